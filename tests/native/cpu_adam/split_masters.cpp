// Is a split master the master, for all 2^32 bit patterns of an fp32, and does a kernel read and write what split() and join() do?
// Sanitizers are slow: under one, or with a number as argument, only every so many-th stretch of patterns is tried.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu_adam.h"
#include "pool.h"

using namespace infinity::cpu_adam;

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kStep = 64;
#else
constexpr int kStep = 1;
#endif

constexpr std::size_t kStretch = 1 << 20;
constexpr std::uint32_t kNan = 0x7fc00000;

int fail(std::uint32_t bits, const char* what) {
  std::printf("failed for the bits %08x: %s\n", bits, what);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  Pool pool(4);
  std::vector<std::uint32_t> masters(kStretch), joined(kStretch);
  std::vector<std::uint16_t> param(kStretch), kept_param(kStretch);
  std::vector<std::int16_t> low(kStretch), kept_low(kStretch);
  // sgd with nothing to do: reads and writes the master of every element.
  const Hyper nothing{0, 0, 0, 0, 0, 1, 1, 1, true};
  const int step = argc > 1 ? std::atoi(argv[1]) : kStep;
  for (std::uint64_t start = 0; start < 1ull << 32; start += kStretch * static_cast<std::uint64_t>(step)) {
    for (std::size_t i = 0; i < kStretch; ++i) masters[i] = static_cast<std::uint32_t>(start + i);
    split(reinterpret_cast<const float*>(masters.data()), param.data(), low.data(), kStretch);
    join(param.data(), low.data(), reinterpret_cast<float*>(joined.data()), kStretch);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < kStretch; ++i) {
      const std::uint32_t bits = masters[i], expected = (bits & 0x7fffffff) > 0x7f800000 ? kNan : bits;
      wrong += joined[i] != expected || param[i] != static_cast<std::uint16_t>((expected + 0x8000) >> 16);
    }
    if (wrong) return fail(masters[0], "split and join");
    for (const Isa isa : {Isa::avx2, best_isa()}) {
      if (!has_isa(isa)) continue;
      kept_param = param;
      kept_low = low;
      const Chunk chunk{nullptr, Dtype::fp32, param.data(), Dtype::bf16, low.data(), Master::split, nullptr, nullptr, Format::fp32, 0, 0};
      update(Rule::sgd, chunk, 0, kStretch, nothing, isa, pool);
      if (param != kept_param || low != kept_low) return fail(masters[0], "a kernel changed what it should have kept");
    }
  }
  return 0;
}
