// What one lane adds up of a norm block (cpu_adam.h, squared_norm). Like launch.h it needs no GPU.
#pragma once

#include "../cpu_adam/convert.h"

namespace infinity::cuda {
namespace {

constexpr unsigned kLanes = 8;   // partial sums per norm block
constexpr unsigned kAhead = 32;  // values that a lane loads before it adds the first of them: the additions are one chain, the loads need not be

// A square of an fp32 is exact in double, so to round once in an fma is to round the sum.
// The squares of values [begin, end) of which the index modulo kLanes is that of begin + lane, in order. `widen` makes an fp32 of a T.
template <class T, class Widen>
INFINITY_INLINE double lane_sum(const T* values, std::size_t begin, std::size_t end, unsigned lane, Widen widen) {
  double sum = 0;
  std::size_t i = begin + lane;
  for (; i + (kAhead - 1) * kLanes < end; i += kAhead * kLanes) {
    T ahead[kAhead];
INFINITY_UNROLL for (unsigned k = 0; k < kAhead; ++k) ahead[k] = values[i + k * kLanes];
INFINITY_UNROLL for (unsigned k = 0; k < kAhead; ++k) {
      const double x = widen(ahead[k]);
      sum = __fma_rn(x, x, sum);
    }
  }
  for (; i < end; i += kLanes) {
    const double x = widen(values[i]);
    sum = __fma_rn(x, x, sum);
  }
  return sum;
}

}  // namespace
}  // namespace infinity::cuda
