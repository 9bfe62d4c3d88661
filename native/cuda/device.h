// What of a GPU CUDA has no words for; tests/native/cuda/lanes.h has all of them for the CPU.
#pragma once

#include <cstdint>

namespace infinity::cpu_adam {
namespace {

// The bits of 2^23. They are in memory, because an instruction has room for one constant: the compiler would put this one there, and use
// another instruction for each of the others that octet.h has beside it.
__constant__ std::uint32_t kLarge = 0x4b000000;

// Single instructions, to which numbers below 2^-126 are zero. The errors are those that the specification of PTX allows.
__device__ inline float approximate_root(float x) {  // 2^-23 of it
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}
__device__ inline float approximate_inverse(float x) {  // a unit in the last place
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}
__device__ inline float approximate_inverse_root(float x) {  // 2^-22.9 of it
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

}  // namespace
}  // namespace infinity::cpu_adam
