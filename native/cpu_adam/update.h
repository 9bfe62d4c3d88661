// The update of a group, for any rule, any format and any instruction set. Internal linkage, for the reason given in convert.h.
#pragma once

#include "kernels.h"
#include "rules.h"

namespace infinity::cpu_adam {
namespace {

// A group of gradients. The branch on the format is taken once for a group, here and below.
template <class V>
INFINITY_INLINE void load_gradients(const Run& run, std::size_t i, typename V::Reg (&g)[kRegs<V>]) {
  using Reg = typename V::Reg;
  const auto put = [&](std::size_t k, Reg value) INFINITY_INLINE_LAMBDA { g[k] = value; };
  const auto put_half = [&](std::size_t k, typename V::Bits half) INFINITY_INLINE_LAMBDA { g[k] = bit_cast<Reg>(half << 16); };
  if (!run.grad) {
    INFINITY_UNROLL for (auto& reg : g) reg = V::all(0);
  } else if (run.grad_dtype == Dtype::fp32) {
    Group<V>::load(static_cast<const float*>(run.grad) + i, put);
  } else if (run.grad_dtype == Dtype::bf16) {
    Group<V>::load_halves(static_cast<const std::uint16_t*>(run.grad) + i, put_half);
  } else {
    Group<V>::load_fp16(static_cast<const std::uint16_t*>(run.grad) + i, put);
  }
}

template <class V>
INFINITY_INLINE void load_masters(const Run& run, std::size_t i, typename V::Reg (&w)[kRegs<V>]) {
  using Reg = typename V::Reg;
  using Bits = typename V::Bits;
  if (run.master_format == Master::split) {
    const auto* const param = static_cast<const std::uint16_t*>(run.param) + i;
    const auto* const lacking = static_cast<const std::uint16_t*>(run.master) + i;
    Group<V>::load_pairs(param, lacking, [&](std::size_t k, Bits high, typename V::Ints low) INFINITY_INLINE_LAMBDA {
      w[k] = bit_cast<Reg>(high + bit_cast<Bits>(low));
    });
  } else {
    const auto* const values = static_cast<const float*>(run.master_format == Master::fp32 ? run.master : run.param) + i;
    Group<V>::load(values, [&](std::size_t k, Reg value) INFINITY_INLINE_LAMBDA { w[k] = value; });
  }
}

// [Note: split] With M the bits of an fp32 master, the bf16 parameter is P = (M + 0x8000) >> 16, M rounded to nearest with ties AWAY from
// zero, and low = M - (P << 16) as a signed 16-bit number; M = (P << 16) + low. With ties to even, an even P would stand for the
// 65537 values of M from -0x8000 to +0x8000 around it, one more than 16 bits can tell apart. So that all formats of the master give the
// same parameters bit for bit, bf16 parameters are rounded this way everywhere. fp16 has no split and stays with ties to even.
// low == 0 is the parameter, widened: a master that was never written reads as zeros.
template <class V>
INFINITY_INLINE void store_masters(const Run& to, std::size_t i, const typename V::Reg (&w)[kRegs<V>]) {
  const bool all = to.streamed == Streamed::all;
  if (to.master_format != Master::split) {
    auto* const values = static_cast<float*>(to.master_format == Master::fp32 ? to.master : to.param) + i;
    put<V>(values, all, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return w[k]; });
    if (to.master_format == Master::none) return;
  }
  auto* const param = static_cast<std::uint16_t*>(to.param) + i;
  if (to.param_dtype == Dtype::fp16) {
    put_halves<V>(param, all, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return V::to_fp16(w[k]); });
  } else {
    put_upper<V>(param, to.streamed != Streamed::nothing, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return bits_of<V>(w[k]) + 0x8000u; });
  }
  if (to.master_format == Master::split) {  // the lower 16 bits of M - (P << 16) are those of M
    put_lower<V>(static_cast<std::uint16_t*>(to.master) + i, all, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return bits_of<V>(w[k]); });
  }
}

// The part of a rule that needs the root of the second moment.
template <class V, class Rule, class A>
INFINITY_INLINE void finish(const Constants& c, typename V::Reg& w, typename V::Reg g, typename V::Reg m, typename V::Reg v,
                            typename V::Reg& root) {
  root = A::root(v);
  Rule::template finish<A>(c, w, g, m, root);
}

template <class V, class Rule>
INFINITY_INLINE void apply(const Constants& c, typename V::Reg (&w)[kRegs<V>], typename V::Reg (&g)[kRegs<V>],
                           typename V::Reg (&m)[kRegs<V>], typename V::Reg (&v)[kRegs<V>], typename V::Reg (&s)[kRegs<V>],
                           typename V::Reg (&root)[kRegs<V>]) {
  constexpr bool asks = Rule::second && Quick<V>::known;
  INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) {
    g[k] = g[k] * c.grad_scale;
    if constexpr (Rule::slow) {
      Rule::begin(c, w[k], g[k], m[k], v[k], s[k]);
    } else {
      Rule::begin(c, w[k], g[k], m[k], v[k]);
    }
    if constexpr (Rule::second && !asks) finish<V, Rule, Exact<V>>(c, w[k], g[k], m[k], v[k], root[k]);
  }
  if constexpr (asks) {
    if (Quick<V>::template ordinary<Rule>(c, g, m, v)) {
      INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) finish<V, Rule, Quick<V>>(c, w[k], g[k], m[k], v[k], root[k]);
    } else {
      INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) finish<V, Rule, Exact<V>>(c, w[k], g[k], m[k], v[k], root[k]);
    }
  }
  INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) w[k] = canonical<V>(w[k]);
}

// The group that begins with element i of the run; what becomes of it is written to where `to` lies, which may be the run itself.
template <class V, template <class> class RuleOf, Format format>
INFINITY_INLINE void update_group(const Run& run, const Run& to, const Constants& c, std::size_t i) {
  using Rule = RuleOf<V>;
  typename V::Reg w[kRegs<V>], g[kRegs<V>], m[kRegs<V>], v[kRegs<V>], s[kRegs<V>], root[kRegs<V>];
  if constexpr (Rule::first) load<V, format, Moment::first>(run.first, i, m);
  if constexpr (Rule::second) load<V, format, Moment::second>(run.second, i, v);
  if constexpr (Rule::slow) load<V, format, Moment::first>(run.slow, i, s);
  load_masters<V>(run, i, w);
  load_gradients<V>(run, i, g);
  apply<V, Rule>(c, w, g, m, v, s, root);
  store_masters<V>(to, i, w);
  typename V::Bits noise[kRegs<V>] = {};
  if constexpr (format != Format::fp32) {
    const std::uint32_t begun = begin_noise(run.noise, run.number + static_cast<std::uint32_t>(i));
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) {
      noise[k] = kept(end_noise(run.noise, (V::lanes() + static_cast<std::uint32_t>(k * Group<V>::step)) ^ begun));
    }
  }
  if constexpr (Rule::first) store<V, format, Moment::first>(to.first, i, m, m, noise, to.streamed == Streamed::all);
  if constexpr (Rule::second) store<V, format, Moment::second>(to.second, i, v, root, noise, to.streamed == Streamed::all);
  if constexpr (Rule::slow) {  // its bits are the lower ones of the second moment's share: nearly independent of how the others are rounded
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) noise[k] = noise[k] >> 8;
    store<V, format, Moment::first>(to.slow, i, s, s, noise, to.streamed == Streamed::all);
  }
}

}  // namespace
}  // namespace infinity::cpu_adam
