// Adam on the CPU: one specification (scalar), AVX2 and AVX-512 kernels that agree with it bit for bit.
//
// Every operation is an IEEE-754 single-precision operation, correctly rounded, in the order written at `adam_step`; nothing is
// contracted to a fused multiply-add, so results do not depend on instruction set, thread count, chunking or address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::cpu_adam {

enum class Dtype { fp32, bf16, fp16 };
enum class Isa { scalar, avx2, avx512 };

// The hyper-parameters of one step, in double, as the caller has them.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay;
  double bias_correction1;       // 1 - beta1^t
  double bias_correction2_sqrt;  // sqrt(1 - beta2^t)
  double grad_scale;             // unscale * clip factor; multiplied into the gradient first
  bool decoupled;                // true: AdamW (weight decay on the parameter); false: Adam (added to the gradient)
};

// What the kernels work with: each constant is computed in double and rounded to fp32 once. Rounding the hyper-parameters
// first would not do: 1 - 0.999f is 0.00100004673, and v would be off by 5e-5.
struct Constants {
  explicit Constants(const Hyper& h)
      : grad_scale(static_cast<float>(h.grad_scale)), weight_decay(static_cast<float>(h.weight_decay)),
        keep_weight(static_cast<float>(1 - h.lr * h.weight_decay)), beta1(static_cast<float>(h.beta1)),
        rest1(static_cast<float>(1 - h.beta1)), beta2(static_cast<float>(h.beta2)), rest2(static_cast<float>(1 - h.beta2)),
        correction2(static_cast<float>(h.bias_correction2_sqrt)), eps(static_cast<float>(h.eps)),
        step(static_cast<float>(h.lr / h.bias_correction1)), decay(h.weight_decay != 0), decoupled(h.decoupled) {}
  float grad_scale, weight_decay, keep_weight, beta1, rest1, beta2, rest2, correction2, eps, step;
  bool decay, decoupled;
};

// For every i in [0, n), all in fp32, with c = Constants(hyper):
//   g  = float(grad[i]) * c.grad_scale
//   w  = master[i]
//   decoupled:  w = w * c.keep_weight        otherwise:  g = g + c.weight_decay * w     (skipped when weight_decay == 0)
//   m  = c.beta1 * m + c.rest1 * g
//   v  = c.beta2 * v + (c.rest2 * g) * g
//   d  = sqrt(v) / c.correction2 + c.eps
//   w  = w - c.step * (m / d)
//   master[i] = w; out[i] = round-to-nearest-even(w) in out_dtype        (out may be null, or equal to master when fp32)
// bf16/fp16 conversion of NaN gives a quiet NaN; fp16 overflow gives infinity. grad == null means all-zero gradients.
struct Arrays {
  const void* grad; Dtype grad_dtype;
  float* master; float* exp_avg; float* exp_avg_sq;
  void* out; Dtype out_dtype;
};

class Pool;  // worker threads; size fixed at construction, independent of OMP_NUM_THREADS

Isa best_isa();                 // what this CPU has
bool has_isa(Isa isa);

// Blocking. Throws std::invalid_argument when the CPU lacks `isa`.
void adam_step(const Arrays& arrays, std::size_t n, const Hyper& hyper, Isa isa, Pool& pool);

// carry + sum over consecutive blocks of kNormBlock elements of (sum over 8 lanes, lane = index % 8 within the block, each lane added
// in index order in double; lanes then added in order 0..7), blocks added in order. A square of an fp32 is exact in double, so the
// result depends only on the values: not on instruction set, threads, or on how a buffer is cut into calls, when every call but the
// last has a multiple of kNormBlock elements. inf and NaN propagate.
constexpr std::size_t kNormBlock = 16384;
double squared_norm(const void* values, Dtype dtype, std::size_t n, double carry, Isa isa, Pool& pool);

}  // namespace infinity::cpu_adam
