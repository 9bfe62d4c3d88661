// What of a GPU CUDA has no words for.
#pragma once

#include <cstdint>

// An instruction of one operand, to which numbers below 2^-126 are zeros, and memory of a block. A C++ compiler has no substitute for
// these: where the kernels run on the CPU, tests/native/cuda/on_cpu defines both.
#ifndef INFINITY_APPROXIMATE
#define INFINITY_APPROXIMATE(instruction, result, x) asm(instruction ".approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x))
#define INFINITY_SHARED(type, name, count) __shared__ type name[count]
#endif

namespace infinity::cpu_adam {
namespace {

// The bits of 2^23. They are in memory, because an instruction has room for one constant: the compiler would put this one there, and use
// another instruction for each of the others that octet.h has beside it.
__constant__ std::uint32_t kLarge = 0x4b000000;

// The errors are those that the specification of PTX allows.
__device__ inline float approximate_root(float x) {  // 2^-23 of it
  float root;
  INFINITY_APPROXIMATE("sqrt", root, x);
  return root;
}
__device__ inline float approximate_inverse(float x) {  // a unit in the last place
  float inverse;
  INFINITY_APPROXIMATE("rcp", inverse, x);
  return inverse;
}
__device__ inline float approximate_inverse_root(float x) {  // 2^-22.9 of it
  float inverse;
  INFINITY_APPROXIMATE("rsqrt", inverse, x);
  return inverse;
}

}  // namespace
}  // namespace infinity::cpu_adam
