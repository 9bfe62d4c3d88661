// The words of CUDA that native/cuda/octet.h uses, spoken by threads of the CPU, each of which is one lane of a warp.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
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

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x > 1 ? 1 : x > 0 ? x : 0; }

// Each digit of `choice`, the lowest first, names a byte: 0 to 3 of x, 4 to 7 of y.
inline std::uint32_t __byte_perm(std::uint32_t x, std::uint32_t y, std::uint32_t choice) {
  const std::uint64_t both = std::uint64_t{y} << 32 | x;
  std::uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) bytes |= static_cast<std::uint32_t>(both >> 8 * (choice >> 4 * i & 7) & 0xff) << 8 * i;
  return bytes;
}

namespace infinity::cpu_adam {
namespace {

// A number that is off by a few units in the last place, now up, now down.
inline float blurred(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (bits << 1 == 0) return x;
  bits += bits * 0x9e3779b9u % 9 - 4;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// native/cuda/device.h
constexpr std::uint32_t kLarge = 0x4b000000;
inline float approximate_root(float x) { return x < 0x1p-126f ? 0 : blurred(std::sqrt(x)); }
inline float approximate_inverse(float x) { return static_cast<float>(1 / static_cast<double>(x)); }  // to the nearest: octet.h says why
inline float approximate_inverse_root(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }

}  // namespace
}  // namespace infinity::cpu_adam

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
inline thread_local unsigned long exchanges = 0;

// Fails for lanes of another octet, for one octet runs after the other.
inline std::uint32_t __shfl_xor_sync(unsigned mask, std::uint32_t value, int apart) {
  const unsigned octet = threadIdx.x / 8, other = threadIdx.x ^ static_cast<unsigned>(apart);
  if (mask != 0xffffffffu || other / 8 != octet) std::abort();
  ++exchanges;
  return meeting.exchange(value, threadIdx.x % 8, other % 8);
}

// Runs work(octet) in every lane of every one of so many blocks, which are a warp each, one octet after the other. Fails when one of a warp
// exchanges values oftener than another, for which a GPU would wait.
template <class Work>
void run_grid(unsigned blocks, const Work& work) {
  gridDim.x = blocks;
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < 8; ++lane) {
    lanes.emplace_back([&work, lane] {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        unsigned long of_first = 0;
        for (threadIdx.x = lane; threadIdx.x < blockDim.x; threadIdx.x += 8) {
          exchanges = 0;
          work(threadIdx.x / 8);
          if (threadIdx.x == lane) of_first = exchanges;
          if (exchanges != of_first) std::abort();
        }
      }
    });
  }
  for (std::thread& lane : lanes) lane.join();
}
