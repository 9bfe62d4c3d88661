// The specification: what every other kernel must equal bit for bit. Also the remainder loop of the vector kernels.
#include <cmath>

#include "convert.h"
#include "kernels.h"

namespace infinity::cpu_adam::scalar {

void adam(const Arrays& arrays, std::size_t begin, std::size_t end, const Constants& c) {
  for (std::size_t i = begin; i < end; ++i) {
    float g = (arrays.grad ? load(arrays.grad, arrays.grad_dtype, i) : 0.0f) * c.grad_scale;
    float w = arrays.master[i];
    if (c.decay && c.decoupled) w = w * c.keep_weight;
    if (c.decay && !c.decoupled) g = g + c.weight_decay * w;
    const float m = c.beta1 * arrays.exp_avg[i] + c.rest1 * g;
    const float v = c.beta2 * arrays.exp_avg_sq[i] + (c.rest2 * g) * g;
    const float d = std::sqrt(v) / c.correction2 + c.eps;
    w = canonical(w - c.step * (m / d));
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
