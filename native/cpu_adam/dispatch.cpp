// The public functions: choose a kernel for this CPU, cut the work into ranges for the pool.
#include <limits>
#include <stdexcept>
#include <vector>

#include "float_environment.h"
#include "kernels.h"
#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace infinity::cpu_adam {
namespace {

struct Kernels {
  AdamKernel* adam;
  NormKernel* norm_block;
};

Kernels kernels(Isa isa) {
  if (!has_isa(isa)) throw std::invalid_argument("this CPU lacks the requested instruction set");
#if defined(__x86_64__)
  if (isa == Isa::avx512) return {avx512::adam, avx2::norm_block};
  if (isa == Isa::avx2) return {avx2::adam, avx2::norm_block};
#endif
  return {scalar::adam, scalar::norm_block};
}

#if defined(__x86_64__)
// __builtin_cpu_supports also asks whether the operating system saves the wide registers; not every supported compiler knows "f16c".
bool detect(Isa isa) {
  unsigned eax, ebx, ecx, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  const bool avx2 = f16c && __builtin_cpu_supports("avx2");
  return isa == Isa::avx2 ? avx2 : avx2 && __builtin_cpu_supports("avx512f");
}
#endif

}  // namespace

bool has_isa(Isa isa) {
  if (isa == Isa::scalar) return true;
#if defined(__x86_64__)
  static const bool avx2 = detect(Isa::avx2), avx512 = detect(Isa::avx512);  // kept: a virtual machine traps cpuid
  return isa == Isa::avx2 ? avx2 : avx512;
#else
  return false;
#endif
}

Isa best_isa() {
  for (const Isa isa : {Isa::avx512, Isa::avx2}) {
    if (has_isa(isa)) return isa;
  }
  return Isa::scalar;
}

void adam_step(const Arrays& arrays, std::size_t n, const Hyper& hyper, Isa isa, Pool& pool) {
  AdamKernel* const kernel = kernels(isa).adam;
  Arrays a = arrays;
  if (a.out == a.master) a.out = nullptr;
  constexpr std::size_t kGrain = 32;  // 64 bytes of bf16: two threads never write to one cache line of an aligned array
  const DefaultFloatEnvironment environment;  // the constants are rounded too
  const Constants constants(hyper);
  pool.run(n, kGrain, [&](std::size_t begin, std::size_t end) { kernel(a, begin, end, constants); });
}

double squared_norm(const void* values, Dtype dtype, std::size_t n, double carry, Isa isa, Pool& pool) {
  NormKernel* const kernel = kernels(isa).norm_block;
  std::vector<double> sums(n / kNormBlock + (n % kNormBlock != 0));
  // Ranges begin at multiples of the block, and all but the last end at one.
  pool.run(n, kNormBlock, [&](std::size_t begin, std::size_t end) {
    for (; begin < end; begin += kNormBlock) {
      const std::size_t block_end = end - begin < kNormBlock ? end : begin + kNormBlock;
      sums[begin / kNormBlock] = kernel(values, dtype, begin, block_end);
    }
  });
  DefaultFloatEnvironment environment;
  for (const double sum : sums) carry += sum;
  return carry == carry ? carry : std::numeric_limits<double>::quiet_NaN();  // one NaN, as in convert.h [Note: NaN]
}

}  // namespace infinity::cpu_adam
