// fp16 as CUDA has it. The conversion computes the value from its definition, unlike the one of convert.h, which it is compared with.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

struct __half {
  std::uint16_t bits;
};

inline float __half2float(__half half) {
  const int exponent = half.bits >> 10 & 31, fraction = half.bits & 1023;
  float magnitude = std::ldexp(static_cast<float>(fraction + (exponent > 0 ? 1024 : 0)), (exponent > 0 ? exponent : 1) - 25);
  if (exponent == 31) magnitude = fraction > 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  return half.bits >> 15 ? -magnitude : magnitude;
}
