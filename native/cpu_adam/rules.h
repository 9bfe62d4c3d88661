// The update rules, one element or one register of them at a time. Each is torch.optim's with foreach=False in this order of operations;
// `g` is the gradient in fp32 times c.grad_scale. sgd is two rules, because without momentum there is no moment.
//
// Rules with a second moment have two parts: `begin` makes the moments, and `finish` takes the step with its root. They divide and take
// roots by `A`, so that native/cuda can check in between how large the numbers of a group are. Adam divides its first moment by the root, and
// the other rules divide `g`.
#pragma once

#include "convert.h"

namespace infinity::cpu_adam {
namespace {

// Any numbers.
template <class V>
struct Exact {
  using Reg = typename V::Reg;
  INFINITY_INLINE static Reg root(Reg x) { return V::sqrt(x); }
  INFINITY_INLINE static Reg quotient(Reg x, Reg y) { return x / y; }
  INFINITY_INLINE static Reg quotient(Reg x, float y, float) { return x / y; }  // the third is 1 / y, rounded
};

template <class V>
struct Adam {
  static constexpr bool first = true, second = true, slow = false;
  using Reg = typename V::Reg;
  INFINITY_INLINE static void begin(const Constants& c, Reg& w, Reg& g, Reg& m, Reg& v) {
    if (c.decay && c.decoupled) w = w * c.keep_weight;
    if (c.decay && !c.decoupled) g = g + c.weight_decay * w;
    m = c.beta1 * m + c.rest1 * g;
    v = c.beta2 * v + (c.rest2 * g) * g;
  }
  template <class A>
  INFINITY_INLINE static void finish(const Constants& c, Reg& w, Reg, Reg m, Reg root) {
    const Reg d = A::quotient(root, c.correction2, c.inverse2) + c.eps;
    w = w - c.step * A::quotient(m, d);
  }
};

template <class V>
struct Adagrad {  // v is the sum of squares
  static constexpr bool first = false, second = true, slow = false;
  using Reg = typename V::Reg;
  INFINITY_INLINE static void begin(const Constants& c, Reg& w, Reg& g, Reg&, Reg& v) {
    if (c.decay) g = g + c.weight_decay * w;
    v = v + g * g;
  }
  template <class A>
  INFINITY_INLINE static void finish(const Constants& c, Reg& w, Reg g, Reg, Reg root) {
    w = w - c.lr * A::quotient(g, root + c.eps);
  }
};

template <class V>
struct Lion {  // arXiv 2302.06675
  static constexpr bool first = true, second = false, slow = false;
  using Reg = typename V::Reg;
  INFINITY_INLINE static void begin(const Constants& c, Reg& w, Reg& g, Reg& m, Reg&) {
    if (c.decay) w = w * c.keep_weight;
    const Reg u = c.beta1 * m + c.rest1 * g, zero = V::all(0);
    const Reg other = u * 0.0f;  // of zero: zero; of NaN: NaN
    w = w - (u > zero ? V::all(c.lr) : (u < zero ? V::all(-c.lr) : other));
    m = c.beta2 * m + c.rest2 * g;
  }
};

template <class V>
struct AdEMAMix {  // arXiv 2409.03137; s is a slower average of the gradients, which is not corrected
  static constexpr bool first = true, second = true, slow = true;
  using Reg = typename V::Reg;
  INFINITY_INLINE static void begin(const Constants& c, Reg& w, Reg& g, Reg& m, Reg& v, Reg& s) {
    if (c.decay) w = w * c.keep_weight;
    m = c.beta1 * m + c.rest1 * g;
    s = c.beta3 * s + c.rest3 * g;
    v = c.beta2 * v + (c.rest2 * g) * g;
    g = c.inverse1 * m + c.alpha * s;  // what is divided by the root
  }
  template <class A>
  INFINITY_INLINE static void finish(const Constants& c, Reg& w, Reg g, Reg, Reg root) {
    const Reg d = A::quotient(root, c.correction2, c.inverse2) + c.eps;
    w = w - c.lr * A::quotient(g, d);
  }
};

template <class V>
struct Sgd {
  static constexpr bool first = false, second = false, slow = false;
  using Reg = typename V::Reg;
  INFINITY_INLINE static void begin(const Constants& c, Reg& w, Reg& g, Reg&, Reg&) {
    if (c.decay) g = g + c.weight_decay * w;
    w = w - c.lr * g;
  }
};

template <class V>
struct Momentum {
  static constexpr bool first = true, second = false, slow = false;
  using Reg = typename V::Reg;
  INFINITY_INLINE static void begin(const Constants& c, Reg& w, Reg& g, Reg& m, Reg&) {
    if (c.decay) g = g + c.weight_decay * w;
    m = c.first_step ? g : c.momentum * m + c.undamped * g;
    w = w - c.lr * (c.nesterov ? g + c.momentum * m : m);
  }
};

}  // namespace
}  // namespace infinity::cpu_adam
