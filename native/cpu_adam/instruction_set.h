// The code that the file of an instruction set compiles: the loops over the groups of a run, and the table of them. Internal linkage;
// convert.h has the reason.
#pragma once

#include <type_traits>

#include "update.h"

namespace infinity::cpu_adam {
namespace {

template <class V>
INFINITY_INLINE typename V::Reg load_vector(const void* values, Dtype dtype, std::size_t i) {
  if (dtype == Dtype::fp32) return V::load(static_cast<const float*>(values) + i);
  const auto* const at = static_cast<const std::uint16_t*>(values) + i;
  return dtype == Dtype::fp16 ? V::load_fp16(at) : bit_cast<typename V::Reg>(V::load_halves(at) << 16);
}

template <class V, template <class> class RuleOf, Format format>
void update_run(const Run& shared, const Run& there, const Constants& constants) {
  const Run run = shared;  // copies that no store below can alias
  const Constants c = constants;
  if (&there == &shared) {
    for (std::size_t i = 0; i < run.n; i += kGroup) update_group<V, RuleOf, format>(run, run, c, i);
  } else {
    const Run to = there;
    for (std::size_t i = 0; i < run.n; i += kGroup) update_group<V, RuleOf, format>(run, to, c, i);
  }
  V::fence();
}

template <class V, Format format, Moment moment>
void decode_run(const Moments& from, float* to, std::size_t n) {
  for (std::size_t i = 0; i < n; i += kGroup) {
    typename V::Reg x[kRegs<V>];
    load<V, format, moment>(from, i, x);
    for (std::size_t k = 0; k < kRegs<V>; ++k) V::store(to + i + k * V::width, canonical<V>(x[k]));
  }
}

template <class V, Format format, Moment moment>
void encode_run(const Moments& to, const float* from, std::size_t n) {
  typename V::Reg x[kRegs<V>], root[kRegs<V>];
  typename V::Bits noise[kRegs<V>];
  for (auto& bits : noise) bits = typename V::Bits{} + kNearest;
  for (std::size_t i = 0; i < n; i += kGroup) {
    for (std::size_t k = 0; k < kRegs<V>; ++k) {
      x[k] = V::load(from + i + k * V::width);
      root[k] = V::sqrt(x[k]) + 0.0f;  // of -0, which no update makes, 0
    }
    store<V, format, moment>(to, i, x, root, noise);
  }
}

// Adds the squares of values [begin, end) to the lanes of their norm block; `begin` is a multiple of 8.
inline void add_squares(const void* values, Dtype dtype, std::size_t begin, std::size_t end, double (&lanes)[8]) {
  for (std::size_t i = begin; i < end; ++i) {
    const double x = load(values, dtype, i);
    lanes[i % 8] += x * x;
  }
}

inline double sum_of(const double (&lanes)[8]) {
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// The sum of two bf16, each the upper half of 32 bits; the lower half of the result means nothing. The canonical NaN, the only NaN
// here, keeps its upper half.
template <class V>
INFINITY_INLINE typename V::Bits bf16_sum(typename V::Bits a, typename V::Bits b) {
  const auto sum = bits_of<V>(canonical<V>(bit_cast<typename V::Reg>(a) + bit_cast<typename V::Reg>(b)));
  return sum + 0x7fffu + (sum >> 16 & 1u);
}

template <class V, Dtype dtype>
void add_run(void* target, const void* source, std::size_t n) {
  using Bits = typename V::Bits;
  using Value = std::conditional_t<dtype == Dtype::fp32, float, std::uint16_t>;
  auto* const to = static_cast<Value*>(target);
  const auto* const from = static_cast<const Value*>(source);
  for (std::size_t i = 0; i < n; i += kGroup) {
    if constexpr (dtype == Dtype::fp32) {
      INFINITY_UNROLL for (std::size_t k = i; k < i + kGroup; k += V::width) {
        V::store(to + k, canonical<V>(V::load(to + k) + V::load(from + k)));
      }
    } else if constexpr (dtype == Dtype::bf16) {
      // Two neighbours lie in 32 bits and stay there. To widen and narrow registers took AVX2 longer than memory does.
      INFINITY_UNROLL for (std::size_t k = i; k < i + kGroup; k += 2 * V::width) {
        Bits a, b;
        std::memcpy(&a, to + k, sizeof a);
        std::memcpy(&b, from + k, sizeof b);
        const Bits upper = bf16_sum<V>(a & 0xffff0000u, b & 0xffff0000u), lower = bf16_sum<V>(a << 16, b << 16);
        a = (upper & 0xffff0000u) | lower >> 16;
        std::memcpy(to + k, &a, sizeof a);
      }
    } else {
      INFINITY_UNROLL for (std::size_t k = i; k < i + kGroup; k += V::width) {
        V::store_halves(to + k, V::to_fp16(canonical<V>(V::load_fp16(to + k) + V::load_fp16(from + k))));
      }
    }
  }
}

// The plain loop beside which an update is judged, as a compiler makes it for this instruction set.
void in_place_run(float* __restrict a, const float* __restrict b, float* __restrict c, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    a[i] = a[i] * 0.9f + b[i];
    c[i] = c[i] * 0.9f + b[i];
  }
}

// The same with a second home, stored as an update stores into one. Measured on two cores of Zen 4, stores past the caches give 0.85 to
// 0.95 of the bytes per second in place; plain stores, which read what they replace, give 0.6.
template <class V>
void shadow_run(const float* a, const float* b, const float* c, float* to_a, float* to_c, std::size_t n, bool streamed) {
  const std::size_t whole = n / kGroup * kGroup;
  for (std::size_t i = 0; i < whole; i += kGroup) {
    typename V::Reg x[kRegs<V>], y[kRegs<V>];
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) {
      const std::size_t at = i + k * V::width;
      x[k] = V::load(a + at) * 0.9f + V::load(b + at);
      y[k] = V::load(c + at) * 0.9f + V::load(b + at);
    }
    put<V>(to_a + i, streamed, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return x[k]; });
    put<V>(to_c + i, streamed, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return y[k]; });
  }
  for (std::size_t i = whole; i < n; ++i) {
    to_a[i] = a[i] * 0.9f + b[i];
    to_c[i] = c[i] * 0.9f + b[i];
  }
  V::fence();
}

template <class V>
constexpr Kernels make_kernels(NormKernel* norm_blocks) {
  constexpr Format fp32 = Format::fp32, bf16 = Format::bf16, int8 = Format::int8;
  constexpr Moment first = Moment::first, second = Moment::second;
  return {{{update_run<V, Adam, fp32>, update_run<V, Adam, bf16>, update_run<V, Adam, int8>},
           {update_run<V, Adagrad, fp32>, update_run<V, Adagrad, bf16>, update_run<V, Adagrad, int8>},
           {update_run<V, Lion, fp32>, update_run<V, Lion, bf16>, update_run<V, Lion, int8>},
           {update_run<V, AdEMAMix, fp32>, update_run<V, AdEMAMix, bf16>, update_run<V, AdEMAMix, int8>},
           {update_run<V, Sgd, fp32>, update_run<V, Sgd, fp32>, update_run<V, Sgd, fp32>},
           {update_run<V, Momentum, fp32>, update_run<V, Momentum, bf16>, update_run<V, Momentum, int8>}},
          {{decode_run<V, fp32, first>, decode_run<V, fp32, second>},
           {decode_run<V, bf16, first>, decode_run<V, bf16, second>},
           {decode_run<V, int8, first>, decode_run<V, int8, second>}},
          {{encode_run<V, fp32, first>, encode_run<V, fp32, second>},
           {encode_run<V, bf16, first>, encode_run<V, bf16, second>},
           {encode_run<V, int8, first>, encode_run<V, int8, second>}},
          norm_blocks,
          {add_run<V, Dtype::fp32>, add_run<V, Dtype::bf16>, add_run<V, Dtype::fp16>},
          in_place_run, shadow_run<V>};
}

}  // namespace
}  // namespace infinity::cpu_adam
