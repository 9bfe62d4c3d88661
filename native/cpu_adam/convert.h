// bf16 and fp16 to and from fp32, one element at a time. Internal linkage: every includer is compiled for another instruction set, and
// the linker must not pick an AVX-512 copy of a function for all of them. Where nvcc compiles (native/cuda) these are device functions.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "cpu_adam.h"

// Registers must not pass through memory between the parts of a kernel, whatever a compiler thinks of its size; a group is at most
// four registers of AVX2.
#ifdef __CUDACC__
#define INFINITY_DEVICE __device__
#define INFINITY_INLINE_LAMBDA
#define INFINITY_UNROLL _Pragma("unroll")
#else
#define INFINITY_DEVICE
#define INFINITY_INLINE_LAMBDA __attribute__((always_inline))
#define INFINITY_UNROLL _Pragma("GCC unroll 4")
#endif
#define INFINITY_INLINE INFINITY_DEVICE __attribute__((always_inline)) inline

namespace infinity::cpu_adam {
namespace {

static_assert(FLT_EVAL_METHOD == 0, "fp32 expressions must be rounded to fp32 at every operation");

// [Note: NaN] IEEE-754 leaves the sign and payload of a NaN result open; x86 takes them from the first operand, and a compiler may
// swap the operands of + and *. So whatever arithmetic produced, every NaN that is stored becomes this one. It is chosen so that the
// conversions below need no case for NaN: rounding it to bf16 gives 0x7fc0, to fp16 0x7e00. They take canonical values.
constexpr std::uint32_t kCanonicalNan = 0x7fc00000;

INFINITY_DEVICE inline std::uint32_t to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

INFINITY_DEVICE inline float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Keeps a result in a register. Without it, nvcc repeats a hash of ten instructions.
template <class Bits>
INFINITY_INLINE Bits kept(Bits x) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// Correctly rounded, as IEEE-754 asks.
INFINITY_DEVICE inline float root_of(float value) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

INFINITY_DEVICE inline float canonical(float value) { return value == value ? value : from_bits(kCanonicalNan); }

INFINITY_DEVICE inline float from_bf16(std::uint16_t half) { return from_bits(std::uint32_t{half} << 16); }

INFINITY_DEVICE inline float from_fp16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 0) return from_bits(sign | to_bits(static_cast<float>(mantissa) * 0x1p-24f));
  return from_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

INFINITY_DEVICE inline std::uint16_t to_fp16(float value) {  // nearest, ties to even
  const std::uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  std::uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= to_bits(65520.0f)) {  // halfway from the largest fp16, 65504, to 65536
    half = 0x7c00;
  } else if (magnitude >= to_bits(0x1p-14f)) {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  } else {  // subnormal in fp16: the last place of 0.5f is 2^-24, as theirs is, so this addition does the rounding
    half = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  }
  return static_cast<std::uint16_t>(sign | half);
}

INFINITY_DEVICE inline float load(const void* values, Dtype dtype, std::size_t i) {
  switch (dtype) {
    case Dtype::bf16: return from_bf16(static_cast<const std::uint16_t*>(values)[i]);
    case Dtype::fp16: return from_fp16(static_cast<const std::uint16_t*>(values)[i]);
    default: return static_cast<const float*>(values)[i];
  }
}

}  // namespace
}  // namespace infinity::cpu_adam
