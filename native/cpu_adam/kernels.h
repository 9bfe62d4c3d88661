// The single-threaded kernels behind `adam_step` and `squared_norm`, one namespace per instruction set.
#pragma once

#include "cpu_adam.h"

namespace infinity::cpu_adam {

// Updates elements [begin, end).
using AdamKernel = void(const Arrays& arrays, std::size_t begin, std::size_t end, const Constants& c);
// The sum of one norm block: elements [begin, end), at most kNormBlock of them, lane 0 first.
using NormKernel = double(const void* values, Dtype dtype, std::size_t begin, std::size_t end);

namespace scalar {
AdamKernel adam;
NormKernel norm_block;
}  // namespace scalar

namespace avx2 {
AdamKernel adam;
NormKernel norm_block;
}  // namespace avx2

namespace avx512 {
AdamKernel adam;
}  // namespace avx512

}  // namespace infinity::cpu_adam
