// The Adam update of scalar.cpp over vectors, written once for AVX2 and AVX-512. Internal linkage, for the reason given in convert.h.
#pragma once

#include "convert.h"
#include "kernels.h"

namespace infinity::cpu_adam {
namespace {

// `V` names a register type `Reg`, on which the compiler provides + - * /, its `width`, and the operations used here.
template <class V>
inline typename V::Reg load_vector(const void* values, Dtype dtype, std::size_t i) {
  switch (dtype) {
    case Dtype::bf16: return V::load_bf16(static_cast<const std::uint16_t*>(values) + i);
    case Dtype::fp16: return V::load_fp16(static_cast<const std::uint16_t*>(values) + i);
    default: return V::load(static_cast<const float*>(values) + i);
  }
}

template <class V>
inline void store_vector(void* values, Dtype dtype, std::size_t i, typename V::Reg value) {
  switch (dtype) {
    case Dtype::bf16: V::store_bf16(static_cast<std::uint16_t*>(values) + i, value); break;
    case Dtype::fp16: V::store_fp16(static_cast<std::uint16_t*>(values) + i, value); break;
    default: V::store(static_cast<float*>(values) + i, value);
  }
}

// The branches inside the loop always go the same way, and the divisions take longer than all of them.
template <class V>
void adam_vectors(const Arrays& arrays, std::size_t begin, std::size_t end, const Constants& c) {
  using Reg = typename V::Reg;
  const Reg grad_scale = V::all(c.grad_scale), weight_decay = V::all(c.weight_decay), keep_weight = V::all(c.keep_weight);
  const Reg beta1 = V::all(c.beta1), rest1 = V::all(c.rest1), beta2 = V::all(c.beta2), rest2 = V::all(c.rest2);
  const Reg correction2 = V::all(c.correction2), eps = V::all(c.eps), step = V::all(c.step);
  const Arrays a = arrays;  // a copy that no store below can alias

  std::size_t i = begin;
  for (; end - i >= V::width; i += V::width) {
    Reg g = (a.grad ? load_vector<V>(a.grad, a.grad_dtype, i) : V::all(0)) * grad_scale;
    Reg w = V::load(a.master + i);
    if (c.decay && c.decoupled) w = w * keep_weight;
    if (c.decay && !c.decoupled) g = g + weight_decay * w;
    const Reg m = beta1 * V::load(a.exp_avg + i) + rest1 * g;
    const Reg v = beta2 * V::load(a.exp_avg_sq + i) + (rest2 * g) * g;
    const Reg d = V::sqrt(v) / correction2 + eps;
    w = V::canonical(w - step * (m / d));
    V::store(a.exp_avg + i, V::canonical(m));
    V::store(a.exp_avg_sq + i, V::canonical(v));
    V::store(a.master + i, w);
    if (a.out) store_vector<V>(a.out, a.out_dtype, i, w);
  }
  scalar::adam(arrays, i, end, c);
}

}  // namespace
}  // namespace infinity::cpu_adam
