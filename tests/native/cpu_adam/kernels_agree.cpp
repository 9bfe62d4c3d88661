// Do the vector kernels equal the scalar specification bit for bit: every rule, every format, any value, any number of threads?
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
std::size_t size_of(Master master) { return master == Master::none ? 0 : master == Master::fp32 ? 4 : 2; }

struct Formats {
  Dtype grad, param;
  Master master;
  Format moments;
};

struct Problem {
  Bytes grad, param, master, first, second, slow;

  bool operator==(const Problem& other) const {
    return param == other.param && master == other.master && first == other.first && second == other.second &&
           slow == other.slow;
  }
};

// Random bit patterns hold every class of value; half of them are drawn again from a range where the update is an ordinary one.
Bytes random_values(std::mt19937& random, std::size_t width, std::size_t bytes) {
  static const std::uint32_t special[] = {0, 0x80000000, 1, 0x807fffff, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7fa00001, 0xffc00000};
  Bytes values(bytes);
  for (std::size_t i = 0; i < bytes / width; ++i) {
    std::uint32_t bits = random();
    if (width == 4 && i % 2 == 0) bits = (bits & 0x80ffffff) | 0x3f000000;
    if (width == 4 && i % 31 == 0) bits = special[bits % 9];
    std::memcpy(values.data() + i * width, &bits, width);
  }
  return values;
}

// int8: any code, and scales of which most are ordinary.
Bytes random_moments(std::mt19937& random, Format format, std::size_t n) {
  if (format != Format::int8) return random_values(random, format == Format::fp32 ? 4 : 2, block_bytes(format, n));
  Bytes block = random_values(random, 1, block_bytes(format, n));
  for (std::size_t superblock = 0; superblock < block.size(); superblock += kSuperblockBytes) {
    const Bytes scales = random_values(random, 4, kSuperblockBytes - kSuperblock);
    std::memcpy(block.data() + superblock + kSuperblock, scales.data(), scales.size());
  }
  return block;
}

Problem make_problem(unsigned seed, const Formats& f, std::size_t n) {
  std::mt19937 random(seed);
  return {random_values(random, size_of(f.grad), n * size_of(f.grad)), random_values(random, size_of(f.param), n * size_of(f.param)),
          size_of(f.master) ? random_values(random, size_of(f.master), n * size_of(f.master)) : Bytes{},
          random_moments(random, f.moments, n), random_moments(random, f.moments, n), random_moments(random, f.moments, n)};
}

Problem updated(Problem p, Rule rule, const Formats& f, std::size_t n, const Hyper& hyper, Isa isa, Pool& pool) {
  const Chunk chunk{p.grad.data(), f.grad, p.param.data(), f.param, p.master.data(), f.master, p.first.data(), p.second.data(),
                    f.moments, (1ull << 32) - 64, 99, p.slow.data()};  // the element numbers pass 2^32
  update(rule, chunk, 0, n, hyper, isa, pool);
  return p;
}

bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace

int main() {
  const std::size_t sizes[] = {1, 31, 32, 100, 1000, kSuperblock + 77};
  Pool one(1), two(2), five(5);
  unsigned seed = 0;
  for (const Rule rule : {Rule::adam, Rule::adagrad, Rule::lion, Rule::ademamix, Rule::sgd}) {
    for (const Format moments : {Format::fp32, Format::bf16, Format::int8}) {
      for (const Dtype grad : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
        for (const auto& [param, master] : {std::pair{Dtype::fp32, Master::none}, {Dtype::bf16, Master::fp32}, {Dtype::fp16, Master::fp32},
                                            {Dtype::bf16, Master::split}}) {
          const Formats formats{grad, param, master, moments};
          const std::size_t n = sizes[++seed % 6];
          const double weight_decay = seed % 3 == 0 ? 0 : 0.1;
          const Hyper hyper{1e-3, 0.9, 0.999, 1e-8, weight_decay, 0.1, 0.0316, 0.7, seed % 2 == 0, seed % 4 == 0 ? 0 : 0.9, 0.1,
                            seed % 5 < 2, seed % 7 == 0, 0.9999, seed % 6 + 0.5};
          const Problem problem = make_problem(seed, formats, n);
          const Problem expected = updated(problem, rule, formats, n, hyper, Isa::scalar, one);
          const double norm = squared_norm(problem.grad.data(), grad, n, 0.5, Isa::scalar, one);
          for (const Isa isa : {Isa::scalar, Isa::neon, Isa::avx2, Isa::avx512}) {
            if (!has_isa(isa)) continue;
            for (Pool* const pool : {&one, &two, &five}) {
              // The kernels must not see the caller's rounding mode.
              std::fesetround(FE_UPWARD);
              const Problem result = updated(problem, rule, formats, n, hyper, isa, *pool);
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
  }
  // Four norm blocks take turns; here are some more, and a part of one.
  const std::size_t n = 9 * kNormBlock + 1003;
  std::mt19937 random(1);
  for (const Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    const Bytes values = random_values(random, size_of(dtype), n * size_of(dtype));
    Bytes finite(values.size());  // one NaN would hide the other values
    for (std::size_t i = 0; i < finite.size(); ++i) finite[i] = values[i] & (i % size_of(dtype) == size_of(dtype) - 1 ? 0xb3 : 0xff);
    for (const Bytes& each : {values, finite}) {
      const double expected = squared_norm(each.data(), dtype, n, 0.5, Isa::scalar, one);
      for (const Isa isa : {Isa::neon, Isa::avx2, Isa::avx512}) {
        for (Pool* const pool : {&one, &two, &five}) {
          if (!has_isa(isa) || same_bits(expected, squared_norm(each.data(), dtype, n, 0.5, isa, *pool))) continue;
          std::printf("dtype %d, instruction set %d, %d threads: norm DIFFERS\n", static_cast<int>(dtype), static_cast<int>(isa), pool->threads());
          return 1;
        }
      }
    }
  }
  return 0;
}
