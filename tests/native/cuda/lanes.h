// The words of CUDA that native/cuda/octet.h uses, spoken by threads of the CPU, each of which is one lane of a warp.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx{0}, blockIdx{0};
inline constexpr Index blockDim{32};
inline Index gridDim{1};  // set by run_grid

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  std::uint32_t x, y;
};

// In double the sum is exact, or so near to one of the operands that it is cut off.
inline float __fadd_rz(float a, float b) {
  const double sum = static_cast<double>(a) + b;
  const float nearest = static_cast<float>(sum);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
}

// Eight lanes that exchange what they hold. Who waits lets others run, for there are more lanes than CPUs.
class Meeting {
 public:
  std::uint32_t exchange(std::uint32_t mine, unsigned lane, unsigned other) {
    held_[lane] = mine;
    wait();
    const std::uint32_t theirs = held_[other];
    wait();
    return theirs;
  }

 private:
  void wait() {
    const unsigned long round = round_;
    if (++here_ == 8) {
      here_ = 0;
      ++round_;
    } else {
      while (round_ == round) std::this_thread::yield();
    }
  }

  std::atomic<unsigned> here_{0};
  std::atomic<unsigned long> round_{0};
  std::uint32_t held_[8];
};
inline Meeting meeting;


// Fails for lanes outside the mask, which a GPU would wait for.
inline std::uint32_t __shfl_xor_sync(unsigned mask, std::uint32_t value, int apart) {
  const unsigned octet = threadIdx.x / 8, other = threadIdx.x ^ static_cast<unsigned>(apart);
  if (mask != 0xffu << 8 * octet || other / 8 != octet) std::abort();
  return meeting.exchange(value, threadIdx.x % 8, other % 8);
}

// Runs work(octet) in every lane of every one of so many blocks, one octet after the other.
template <class Work>
void run_grid(unsigned blocks, const Work& work) {
  gridDim.x = blocks;
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < 8; ++lane) {
    lanes.emplace_back([&work, lane] {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        for (threadIdx.x = lane; threadIdx.x < blockDim.x; threadIdx.x += 8) work(threadIdx.x / 8);
      }
    });
  }
  for (std::thread& lane : lanes) lane.join();
}
