// The update of a run, for any rule, any format and any instruction set. Internal linkage, for the reason given in convert.h.
#pragma once

#include "kernels.h"
#include "rules.h"

namespace infinity::cpu_adam {
namespace {

template <class V>
typename V::Reg load_vector(const void* values, Dtype dtype, std::size_t i) {
  switch (dtype) {
    case Dtype::bf16: return bit_cast<typename V::Reg>(V::load_halves(static_cast<const std::uint16_t*>(values) + i) << 16);
    case Dtype::fp16: return V::load_fp16(static_cast<const std::uint16_t*>(values) + i);
    default: return V::load(static_cast<const float*>(values) + i);
  }
}

template <class V>
typename V::Reg load_master(const Run& run, std::size_t i) {
  switch (run.master_format) {
    case Master::fp32: return V::load(static_cast<const float*>(run.master) + i);
    case Master::split: {
      const auto high = V::load_halves(static_cast<const std::uint16_t*>(run.param) + i) << 16;
      const auto low = bit_cast<typename V::Ints>(V::load_halves(static_cast<const std::uint16_t*>(run.master) + i) << 16) >> 16;
      return bit_cast<typename V::Reg>(high + bit_cast<typename V::Bits>(low));
    }
    default: return V::load(static_cast<const float*>(run.param) + i);
  }
}

template <class V>
void store_master(const Run& run, std::size_t i, typename V::Reg w) {
  auto* const param = static_cast<std::uint16_t*>(run.param) + i;
  if (run.master_format == Master::none) return V::store(static_cast<float*>(run.param) + i, w);
  if (run.master_format == Master::fp32) V::store(static_cast<float*>(run.master) + i, w);
  if (run.param_dtype == Dtype::fp16) return V::store_halves(param, V::to_fp16(w));
  const auto bits = bits_of<V>(w), high = (bits + 0x8000u) >> 16;
  if (run.stream) {
    V::stream_halves(param, high);
  } else {
    V::store_halves(param, high);
  }
  if (run.master_format == Master::split) {
    V::store_halves(static_cast<std::uint16_t*>(run.master) + i, (bits - (high << 16)) & 0xffffu);
  }
}

// The branches on formats inside the loop always go the same way, and the divisions take longer than all of them.
template <class V, template <class> class RuleOf, Format format>
void update_run(const Run& shared, const Constants& constants) {
  using Rule = RuleOf<V>;
  const Run run = shared;  // copies that no store below can alias
  const Constants c = constants;
  for (std::size_t i = 0; i < run.n; i += kGroup) {
    typename V::Reg m[kRegs<V>], v[kRegs<V>];
    if constexpr (Rule::first) load<V, format, Moment::first>(run.first, i, m);
    if constexpr (Rule::second) load<V, format, Moment::second>(run.second, i, v);
    for (std::size_t k = 0; k < kRegs<V>; ++k) {
      const std::size_t at = i + k * V::width;
      typename V::Reg w = load_master<V>(run, at);
      const typename V::Reg g = (run.grad ? load_vector<V>(run.grad, run.grad_dtype, at) : V::all(0)) * c.grad_scale;
      Rule::apply(c, w, g, m[k], v[k]);
      store_master<V>(run, at, canonical<V>(w));
    }
    typename V::Bits noise[kRegs<V>] = {}, other[kRegs<V>] = {};
    if constexpr (format != Format::fp32) {
      for (std::size_t k = 0; k < kRegs<V>; ++k) {
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
