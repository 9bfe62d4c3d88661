// bf16 as CUDA has it.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  std::uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 half) {
  const std::uint32_t bits = std::uint32_t{half.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
