#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "../cpu_adam/float_environment.h"

// Arithmetic is spelled with the _rn intrinsics: correctly rounded, and never contracted to a fused multiply-add.
namespace infinity::cuda {
namespace {

constexpr unsigned kThreads = 256;    // per CUDA block of the element-wise kernels
constexpr unsigned kMostGrid = 8192;  // CUDA blocks; enough to fill any GPU, the rest is looped over
constexpr unsigned kLanes = 8;        // partial sums per norm block, as in cpu_adam::squared_norm

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Every NaN that is stored is the one that the CPU kernels store (convert.h, [Note: NaN]).
__device__ float canonical(float x) { return x == x ? x : __uint_as_float(0x7fc00000u); }

__device__ void store(float* to, float x) { *to = canonical(x); }
__device__ void store(__half* to, float x) { *to = x == x ? __float2half_rn(x) : __ushort_as_half(0x7e00); }
__device__ void store(__nv_bfloat16* to, float x) { *to = x == x ? __float2bfloat16_rn(x) : __ushort_as_bfloat16(0x7fc0); }

// A parameter from its master: bf16 rounds ties away from zero (convert.h, [Note: split]), where a gradient's sum is rounded as torch's.
template <typename T>
__device__ void store_param(T* to, float x) {
  store(to, x);
}
__device__ void store_param(__nv_bfloat16* to, float x) {
  *to = __ushort_as_bfloat16(static_cast<unsigned short>((__float_as_uint(canonical(x)) + 0x8000u) >> 16));
}

template <typename T>
__global__ void accumulate_kernel(T* dst, const T* src, std::size_t n, bool first) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    if (first) {
      dst[i] = src[i];
    } else {
      store(dst + i, __fadd_rn(to_float(dst[i]), to_float(src[i])));
    }
  }
}

// Eight neighbouring threads own one norm block, one lane each; their sums are added in lane order.
template <typename T>
__global__ void block_sums_kernel(const T* values, std::size_t n, double* block_sums) {
  const std::size_t thread = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::size_t block = thread / kLanes;
  const std::size_t begin = block * cpu_adam::kNormBlock;
  const std::size_t end = begin + cpu_adam::kNormBlock < n ? begin + cpu_adam::kNormBlock : n;
  double sum = 0;
#pragma unroll 8
  for (std::size_t i = begin + thread % kLanes; i < end; i += kLanes) {
    const double x = to_float(values[i]);
    sum = __dadd_rn(sum, __dmul_rn(x, x));
  }
  double total = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    total = __dadd_rn(total, __shfl_sync(0xffffffffu, sum, static_cast<int>(lane), kLanes));
  }
  if (thread % kLanes == 0 && begin < n) {
    block_sums[block] = total;
  }
}

// The order of the additions is the specification, so one thread adds; the others only bring the next tile.
__global__ void add_in_order_kernel(const double* block_sums, std::size_t count, double* total) {
  __shared__ double tile[kThreads];
  double sum = *total;
  for (std::size_t at = 0; at < count; at += kThreads) {
    if (at + threadIdx.x < count) {
      tile[threadIdx.x] = block_sums[at + threadIdx.x];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (std::size_t k = 0; k < kThreads && at + k < count; ++k) {
        sum = __dadd_rn(sum, tile[k]);
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    *total = sum == sum ? sum : __longlong_as_double(0x7ff8000000000000ll);
  }
}

template <typename Grad, typename Out>
__global__ void adam_kernel(const Grad* grad, float* master, float* exp_avg, float* exp_avg_sq, Out* out, std::size_t n,
                            Constants c) {
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    float g = __fmul_rn(grad == nullptr ? 0.0f : to_float(grad[i]), c.grad_scale);
    float w = master[i];
    if (c.decay) {
      if (c.decoupled) {
        w = __fmul_rn(w, c.keep_weight);
      } else {
        g = __fadd_rn(g, __fmul_rn(c.weight_decay, w));
      }
    }
    const float m = __fadd_rn(__fmul_rn(c.beta1, exp_avg[i]), __fmul_rn(c.rest1, g));
    const float v = __fadd_rn(__fmul_rn(c.beta2, exp_avg_sq[i]), __fmul_rn(__fmul_rn(c.rest2, g), g));
    const float d = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), c.correction2), c.eps);
    w = __fsub_rn(w, __fmul_rn(c.step, __fdiv_rn(m, d)));
    store(exp_avg + i, m);
    store(exp_avg_sq + i, v);
    store(master + i, w);
    if (out != nullptr) {
      store_param(out + i, w);
    }
  }
}

// Calls `launch` with a null pointer of the element type that `dtype` names.
template <typename Launch>
void with_type(Dtype dtype, Launch&& launch) {
  switch (dtype) {
    case Dtype::fp32:
      return launch(static_cast<float*>(nullptr));
    case Dtype::bf16:
      return launch(static_cast<__nv_bfloat16*>(nullptr));
    case Dtype::fp16:
      return launch(static_cast<__half*>(nullptr));
  }
}

unsigned grid(std::size_t n, std::size_t per_block) {
  return static_cast<unsigned>(std::min<std::size_t>((n + per_block - 1) / per_block, kMostGrid));
}

cudaStream_t as_stream(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + " could not be launched: " + cudaGetErrorString(error));
  }
}

}  // namespace

std::string unavailable_reason() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess) {
    return devices > 0 ? "" : "no CUDA device";
  }
  cudaGetLastError();  // the answer is the return value; the next launch must not find it again
  return cudaGetErrorString(error);
}

void accumulate(void* dst, const void* src, Dtype dtype, std::size_t n, bool first, std::uintptr_t stream) {
  if (n == 0) {
    return;
  }
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    accumulate_kernel<<<grid(n, kThreads), kThreads, 0, as_stream(stream)>>>(static_cast<T*>(dst),
                                                                             static_cast<const T*>(src), n, first);
  });
  check_launch("accumulate");
}

void squared_norm(const void* values, Dtype dtype, std::size_t n, double* block_sums, double* total,
                  std::uintptr_t stream) {
  if (n == 0) {
    return;
  }
  const std::size_t blocks = norm_blocks(n);
  const unsigned threads = 64;  // small CUDA blocks, so that a small buffer still spreads over the GPU
  const unsigned cuda_blocks = static_cast<unsigned>((blocks * kLanes + threads - 1) / threads);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    block_sums_kernel<<<cuda_blocks, threads, 0, as_stream(stream)>>>(static_cast<const T*>(values), n, block_sums);
  });
  check_launch("squared_norm");
  add_in_order_kernel<<<1, kThreads, 0, as_stream(stream)>>>(block_sums, blocks, total);
  check_launch("squared_norm");
}

void adam_step(const Arrays& arrays, std::size_t n, const Hyper& hyper, std::uintptr_t stream) {
  if (n == 0) {
    return;
  }
  const Constants constants = [&] {
    const cpu_adam::DefaultFloatEnvironment environment;  // as on the CPU, whatever rounding mode the caller is in
    return Constants(hyper);
  }();
  with_type(arrays.grad_dtype, [&](auto* grad_type) {
    using Grad = std::remove_pointer_t<decltype(grad_type)>;
    with_type(arrays.out_dtype, [&](auto* out_type) {
      using Out = std::remove_pointer_t<decltype(out_type)>;
      adam_kernel<<<grid(n, kThreads), kThreads, 0, as_stream(stream)>>>(
          static_cast<const Grad*>(arrays.grad), arrays.master, arrays.exp_avg, arrays.exp_avg_sq,
          static_cast<Out*>(arrays.out), n, constants);
    });
  });
  check_launch("adam_step");
}

}  // namespace infinity::cuda
