// The CUDA twins of native/cpu_adam plus gradient accumulation. They follow the specification written in cpu_adam.h operation by
// operation, so that a number does not depend on the device that computed it.
//
// The six questions a caller has:
//   Which thread?        Any. The caller's current CUDA device is the one that owns the stream and the memory.
//   Does it block?       No: every function enqueues kernels on `stream` (a cudaStream_t as an integer; 0 is the default
//                        stream) and returns. It may wait for room in the driver's launch queue.
//   Queue full?          See above.
//   Completion seen?     By the caller's own event or by synchronizing the stream.
//   What is the result?  In device memory. A launch that fails throws std::runtime_error with CUDA's reason; an error inside a kernel
//                        shows at the caller's next synchronization.
//   Who outlives whom?   All memory outlives the work on the stream. Nothing is allocated here; there is no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../cpu_adam/cpu_adam.h"

namespace infinity::cuda {

using cpu_adam::Constants;
using cpu_adam::Dtype;
using cpu_adam::Hyper;

// What adam_step works on. `out` is bf16 or fp16, or null, or `master` when fp32.
struct Arrays {
  const void* grad;
  Dtype grad_dtype;
  float *master, *exp_avg, *exp_avg_sq;
  void* out;
  Dtype out_dtype;
};

// Why kernels cannot run in this process (no driver, driver older than the toolkit, no device); empty when they can.
std::string unavailable_reason();

// dst[i] = first ? src[i] : dst[i] + src[i], added in fp32 and rounded to nearest even, which is what torch's add does.
void accumulate(void* dst, const void* src, Dtype dtype, std::size_t n, bool first, std::uintptr_t stream);

// Doubles of device memory that squared_norm() needs as `block_sums` for `n` values.
constexpr std::size_t norm_blocks(std::size_t n) { return (n + cpu_adam::kNormBlock - 1) / cpu_adam::kNormBlock; }

// *total = cpu_adam::squared_norm(values, dtype, n, *total); `total` and `block_sums` are device memory.
void squared_norm(const void* values, Dtype dtype, std::size_t n, double* block_sums, double* total, std::uintptr_t stream);

// cpu_adam::update with Rule::adam and fp32 masters and moments, on device memory. `grad` may be null: zeros.
void adam_step(const Arrays& arrays, std::size_t n, const Hyper& hyper, std::uintptr_t stream);

}  // namespace infinity::cuda
