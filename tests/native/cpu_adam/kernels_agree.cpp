// Do the AVX2 and AVX-512 kernels equal the scalar specification bit for bit, on any value, in any number of threads?
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cpu_adam.h"
#include "pool.h"

using namespace infinity::cpu_adam;

namespace {

// Exactly as long as the data, on the heap, so that the address sanitizer sees the first byte too many.
using Bytes = std::vector<unsigned char>;

std::size_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

struct Problem {
  Bytes grad, master, exp_avg, exp_avg_sq, out;

  bool operator==(const Problem& other) const {
    return master == other.master && exp_avg == other.exp_avg && exp_avg_sq == other.exp_avg_sq && out == other.out;
  }
};

// Random bit patterns hold every class of value; half of them are drawn again from a range where the update is an ordinary one.
Bytes random_values(std::mt19937& random, Dtype dtype, std::size_t n) {
  static const std::uint32_t special[] = {0, 0x80000000, 1, 0x807fffff, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7fa00001, 0xffc00000};
  Bytes bytes(n * size_of(dtype));
  for (std::size_t i = 0; i < n; ++i) {
    std::uint32_t bits = random();
    if (dtype == Dtype::fp32 && i % 2 == 0) bits = (bits & 0x80ffffff) | 0x3f000000;
    if (dtype == Dtype::fp32 && i % 7 == 0) bits = special[bits % 9];
    std::memcpy(bytes.data() + i * size_of(dtype), &bits, size_of(dtype));
  }
  return bytes;
}

Problem make_problem(unsigned seed, Dtype grad, Dtype out, std::size_t n) {
  std::mt19937 random(seed);
  return {random_values(random, grad, n), random_values(random, Dtype::fp32, n), random_values(random, Dtype::fp32, n),
          random_values(random, Dtype::fp32, n), Bytes(n * size_of(out))};
}

Problem updated(Problem p, Dtype grad, Dtype out, std::size_t n, const Hyper& hyper, Isa isa, Pool& pool) {
  const auto floats = [](Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); };
  adam_step({p.grad.data(), grad, floats(p.master), floats(p.exp_avg), floats(p.exp_avg_sq), p.out.data(), out}, n, hyper, isa, pool);
  return p;
}

bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace

int main() {
  if (!has_isa(Isa::avx2)) {
    std::puts("skipped: this CPU has neither AVX2 nor AVX-512");
    return 77;
  }
  const Dtype dtypes[] = {Dtype::fp32, Dtype::bf16, Dtype::fp16};
  const std::size_t sizes[] = {1, 7, 8, 17, 1000, 2 * kNormBlock + 77};
  Pool one(1), two(2), five(5);
  unsigned seed = 0;
  for (const Dtype grad : dtypes) {
    for (const Dtype out : dtypes) {
      for (const std::size_t n : sizes) {
        ++seed;
        const float weight_decay = seed % 3 == 0 ? 0.0f : 0.1f;
        const Hyper hyper{1e-3, 0.9, 0.999, 1e-8, weight_decay, 0.1, 0.0316, 0.7, seed % 2 == 0};
        const Problem problem = make_problem(seed, grad, out, n);
        const Problem expected = updated(problem, grad, out, n, hyper, Isa::scalar, one);
        const double norm = squared_norm(problem.grad.data(), grad, n, 0.5, Isa::scalar, one);
        for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
          if (!has_isa(isa)) continue;
          for (Pool* const pool : {&one, &two, &five}) {
            // The kernels must not see the caller's rounding mode.
            std::fesetround(FE_UPWARD);
            const Problem result = updated(problem, grad, out, n, hyper, isa, *pool);
            const double result_norm = squared_norm(problem.grad.data(), grad, n, 0.5, isa, *pool);
            const bool kept = std::fegetround() == FE_UPWARD;
            std::fesetround(FE_TONEAREST);
            if (result == expected && same_bits(norm, result_norm) && kept) continue;
            std::printf("seed %u, instruction set %d, %d threads: update %s, norm %s, rounding mode %s\n", seed, static_cast<int>(isa),
                        pool->threads(), result == expected ? "equal" : "DIFFERS", same_bits(norm, result_norm) ? "equal" : "DIFFERS",
                        kept ? "restored" : "LOST");
            return 1;
          }
        }
      }
    }
  }
  return 0;
}
