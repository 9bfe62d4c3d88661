// The specification: what every other kernel must equal bit for bit. Also the remainder loop of the vector kernels.
#include <cmath>

#include "convert.h"
#include "kernels.h"

namespace infinity::cpu_adam::scalar {

void adam(const Arrays& arrays, std::size_t begin, std::size_t end, const Hyper& hyper) {
  const float keep_weight = 1 - hyper.lr * hyper.weight_decay;
  const float rest1 = 1 - hyper.beta1;
  const float rest2 = 1 - hyper.beta2;
  const float step = hyper.lr / hyper.bias_correction1;
  const bool decay = hyper.weight_decay != 0;

  for (std::size_t i = begin; i < end; ++i) {
    float g = (arrays.grad ? load(arrays.grad, arrays.grad_dtype, i) : 0.0f) * hyper.grad_scale;
    float w = arrays.master[i];
    if (decay && hyper.decoupled) w = w * keep_weight;
    if (decay && !hyper.decoupled) g = g + hyper.weight_decay * w;
    const float m = hyper.beta1 * arrays.exp_avg[i] + rest1 * g;
    const float v = hyper.beta2 * arrays.exp_avg_sq[i] + (rest2 * g) * g;
    const float d = std::sqrt(v) / hyper.bias_correction2_sqrt + hyper.eps;
    w = canonical(w - step * (m / d));
    arrays.exp_avg[i] = canonical(m);
    arrays.exp_avg_sq[i] = canonical(v);
    arrays.master[i] = w;
    if (arrays.out) store(arrays.out, arrays.out_dtype, i, w);
  }
}

double norm_block(const void* values, Dtype dtype, std::size_t begin, std::size_t end) {
  double lanes[8] = {};
  for (std::size_t i = begin; i < end; ++i) {
    const double x = load(values, dtype, i);
    lanes[(i - begin) % 8] += x * x;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace infinity::cpu_adam::scalar
