// The update of a run, for any rule, any format and any instruction set. Internal linkage, for the reason given in convert.h.
#pragma once

#include "kernels.h"
#include "rules.h"

namespace infinity::cpu_adam {
namespace {

template <class V>
INFINITY_INLINE typename V::Reg load_vector(const void* values, Dtype dtype, std::size_t i) {
  if (dtype == Dtype::fp32) return V::load(static_cast<const float*>(values) + i);
  const auto* const at = static_cast<const std::uint16_t*>(values) + i;
  return dtype == Dtype::fp16 ? V::load_fp16(at) : bit_cast<typename V::Reg>(V::load_halves(at) << 16);
}

// A group of gradients. The branch on the format is taken once for a group, here and below.
template <class V>
INFINITY_INLINE void load_gradients(const Run& run, std::size_t i, typename V::Reg (&g)[kRegs<V>]) {
  const auto load_all = [&](auto dtype) INFINITY_INLINE_LAMBDA {
    INFINITY_UNROLL for (auto& reg : g) reg = load_vector<V>(run.grad, dtype(), i), i += V::width;
  };
  if (!run.grad) {
    INFINITY_UNROLL for (auto& reg : g) reg = V::all(0);
  } else if (run.grad_dtype == Dtype::fp32) {
    load_all([] { return Dtype::fp32; });
  } else if (run.grad_dtype == Dtype::bf16) {
    load_all([] { return Dtype::bf16; });
  } else {
    load_all([] { return Dtype::fp16; });
  }
}

template <class V>
INFINITY_INLINE void load_masters(const Run& run, std::size_t i, typename V::Reg (&w)[kRegs<V>]) {
  if (run.master_format == Master::split) {
    const auto* const param = static_cast<const std::uint16_t*>(run.param) + i;
    const auto* const lacking = static_cast<const std::uint16_t*>(run.master) + i;
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) {
      const auto low = bit_cast<typename V::Ints>(V::load_halves(lacking + k * V::width) << 16) >> 16;
      w[k] = bit_cast<typename V::Reg>((V::load_halves(param + k * V::width) << 16) + bit_cast<typename V::Bits>(low));
    }
  } else {
    const auto* const values = static_cast<const float*>(run.master_format == Master::fp32 ? run.master : run.param) + i;
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) w[k] = V::load(values + k * V::width);
  }
}

template <class V>
INFINITY_INLINE void store_masters(const Run& run, std::size_t i, const typename V::Reg (&w)[kRegs<V>]) {
  if (run.master_format != Master::split) {
    auto* const values = static_cast<float*>(run.master_format == Master::fp32 ? run.master : run.param) + i;
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) V::store(values + k * V::width, w[k]);
    if (run.master_format == Master::none) return;
  }
  auto* const param = static_cast<std::uint16_t*>(run.param) + i;
  if (run.param_dtype == Dtype::fp16) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) V::store_halves(param + k * V::width, V::to_fp16(w[k]));
  } else if (run.stream) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) V::stream_halves(param + k * V::width, to_bf16<V>(w[k]));
  } else {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) V::store_halves(param + k * V::width, to_bf16<V>(w[k]));
  }
  if (run.master_format == Master::split) {
    auto* const lacking = static_cast<std::uint16_t*>(run.master) + i;
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) {  // the lower 16 bits of M - (P << 16) are those of M
      V::store_halves(lacking + k * V::width, bits_of<V>(w[k]) & 0xffffu);
    }
  }
}

template <class V, template <class> class RuleOf, Format format>
void update_run(const Run& shared, const Constants& constants) {
  using Rule = RuleOf<V>;
  const Run run = shared;  // copies that no store below can alias
  const Constants c = constants;
  for (std::size_t i = 0; i < run.n; i += kGroup) {
    typename V::Reg w[kRegs<V>], g[kRegs<V>], m[kRegs<V>], v[kRegs<V>];
    if constexpr (Rule::first) load<V, format, Moment::first>(run.first, i, m);
    if constexpr (Rule::second) load<V, format, Moment::second>(run.second, i, v);
    load_masters<V>(run, i, w);
    load_gradients<V>(run, i, g);
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) {
      Rule::apply(c, w[k], g[k] * c.grad_scale, m[k], v[k]);
      w[k] = canonical<V>(w[k]);
    }
    store_masters<V>(run, i, w);
    typename V::Bits noise[kRegs<V>] = {}, other[kRegs<V>] = {};
    if constexpr (format != Format::fp32) {
      INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) {
        noise[k] = noise_of(run.noise, V::lanes() + (run.number + static_cast<std::uint32_t>(i + k * V::width)));
        other[k] = noise[k] >> 16;
      }
    }
    if constexpr (Rule::first) store<V, format, Moment::first>(run.first, i, m, noise);
    if constexpr (Rule::second) store<V, format, Moment::second>(run.second, i, v, other);
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

template <class V>
constexpr Kernels make_kernels(NormKernel* norm_block) {
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
          norm_block};
}

}  // namespace
}  // namespace infinity::cpu_adam
