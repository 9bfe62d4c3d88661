// What the file of an instruction set compiles: the loops over the groups of a run, and the table of them. Internal linkage, for the reason
// given in convert.h.
#pragma once

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
  typename V::Reg x[kRegs<V>];
  typename V::Bits noise[kRegs<V>];
  for (auto& bits : noise) bits = typename V::Bits{} + kNearest;
  for (std::size_t i = 0; i < n; i += kGroup) {
    for (std::size_t k = 0; k < kRegs<V>; ++k) x[k] = V::load(from + i + k * V::width);
    store<V, format, moment>(to, i, x, noise);
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

// The plain loop beside which an update is judged, as a compiler makes it for this instruction set.
void in_place_run(float* __restrict a, const float* __restrict b, float* __restrict c, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    a[i] = a[i] * 0.9f + b[i];
    c[i] = c[i] * 0.9f + b[i];
  }
}

template <class V>
constexpr Kernels make_kernels(NormKernel* norm_blocks) {
  constexpr Format fp32 = Format::fp32, bf16 = Format::bf16, int8 = Format::int8;
  constexpr Moment first = Moment::first, second = Moment::second;
  return {{{update_run<V, Adam, fp32>, update_run<V, Adam, bf16>, update_run<V, Adam, int8>},
           {update_run<V, Adagrad, fp32>, update_run<V, Adagrad, bf16>, update_run<V, Adagrad, int8>},
           {update_run<V, Lion, fp32>, update_run<V, Lion, bf16>, update_run<V, Lion, int8>},
           {update_run<V, Sgd, fp32>, update_run<V, Sgd, fp32>, update_run<V, Sgd, fp32>},
           {update_run<V, Momentum, fp32>, update_run<V, Momentum, bf16>, update_run<V, Momentum, int8>}},
          {{decode_run<V, fp32, first>, decode_run<V, fp32, second>},
           {decode_run<V, bf16, first>, decode_run<V, bf16, second>},
           {decode_run<V, int8, first>, decode_run<V, int8, second>}},
          {{encode_run<V, fp32, first>, encode_run<V, fp32, second>},
           {encode_run<V, bf16, first>, encode_run<V, bf16, second>},
           {encode_run<V, int8, first>, encode_run<V, int8, second>}},
          norm_blocks,
          in_place_run};
}

}  // namespace
}  // namespace infinity::cpu_adam
