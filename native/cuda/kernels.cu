#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "device.h"
#include "launch.h"
#include "norm.h"

// Compiled with -fmad=false: every operation is rounded on its own, as on the CPU.
namespace infinity::cuda {
namespace {

constexpr unsigned kThreads = 256;     // per CUDA block of the element-wise kernels
constexpr unsigned kNormThreads = 64;  // small CUDA blocks, so that a small buffer still spreads over the GPU

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Eight neighbouring threads own one norm block, one lane each; their sums are added in lane order.
// The bounds leave registers for all the values that a lane loads ahead.
template <typename T>
__global__ void __launch_bounds__(kNormThreads, 16) block_sums_kernel(const T* values, std::size_t n, double* block_sums) {
  const std::size_t thread = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const std::size_t block = thread / kLanes;
  const std::size_t begin = block * kNormBlock;
  const std::size_t end = begin + kNormBlock < n ? begin + kNormBlock : n;
  const double sum = lane_sum(values, begin, end, thread % kLanes, [](T value) { return to_float(value); });
  double total = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    total = total + __shfl_sync(0xffffffffu, sum, static_cast<int>(lane), kLanes);
  }
  if (thread % kLanes == 0 && begin < n) block_sums[block] = total;
}

// The order of the additions is the specification, so one thread adds; the others only bring the next tile, which is on its way meanwhile.
__global__ void add_in_order_kernel(const double* block_sums, std::size_t count, double* total) {
  INFINITY_SHARED(double, tile, kThreads);
  double sum = *total, next = threadIdx.x < count ? block_sums[threadIdx.x] : 0;
  for (std::size_t at = 0; at < count; at += kThreads) {
    tile[threadIdx.x] = next;
    __syncthreads();
    const std::size_t ahead = at + kThreads + threadIdx.x;
    if (ahead < count) next = block_sums[ahead];
    if (threadIdx.x == 0) {
      const unsigned here = count - at < kThreads ? static_cast<unsigned>(count - at) : kThreads;
#pragma unroll 8
      for (unsigned k = 0; k < here; ++k) sum = sum + tile[k];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *total = sum == sum ? sum : __longlong_as_double(0x7ff8000000000000ll);
}

template <template <class> class RuleOf, Format format, Dtype grad, Master master>
__global__ void __launch_bounds__(kThreads, 4) whole_kernel(const __grid_constant__ Launch launch) {
  update_whole<RuleOf, format, grad, master>(launch);
}

template <template <class> class RuleOf, Format format>
__global__ void __launch_bounds__(kThreads) any_kernel(const __grid_constant__ Launch launch) {
  INFINITY_SHARED(Stage, stages, kThreads / 8);
  update_any<RuleOf, format>(launch, stages[threadIdx.x / 8]);
}

constexpr int kDevices = 32;  // whose answers are kept; about others CUDA is asked at every launch

// A kernel, and of each device how many of its CUDA blocks run there at once; 0 until a launch asks. Two threads that ask at the same
// time get the same answer.
struct UpdateKernel {
  void (*function)(Launch);
  std::atomic<unsigned> resident[kDevices] = {};
};
template <void (*function)(Launch)>
UpdateKernel update_kernel{function};

struct MakeKernels {
  template <template <class> class RuleOf, Format format, Dtype grad, Master master>
  static constexpr UpdateKernel* whole() {
    return &update_kernel<whole_kernel<RuleOf, format, grad, master>>;
  }
  template <template <class> class RuleOf, Format format>
  static constexpr UpdateKernel* any() {
    return &update_kernel<any_kernel<RuleOf, format>>;
  }
};

// Calls `f` with a null pointer of the element type that `dtype` names.
template <typename F>
void with_type(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::fp32: return f(static_cast<float*>(nullptr));
    case Dtype::bf16: return f(static_cast<__nv_bfloat16*>(nullptr));
    case Dtype::fp16: return f(static_cast<__half*>(nullptr));
  }
}

cudaStream_t as_stream(std::uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Checks the result of a call of CUDA, and not cudaGetLastError, which another library may have left set on this thread. A failed call
// sets it, too, so it is cleared for later calls. A broken context stays: every call returns that error.
void check_cuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(what + ": " + cudaGetErrorString(error));
}

const char* const kNoUpdate = "update could not be launched";
const char* const kNoNorm = "squared_norm could not be launched";

template <class... Parameters>
cudaError_t launched(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::uintptr_t stream,
                     std::remove_const_t<Parameters>... arguments) {
  void* addresses[] = {&arguments...};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), addresses, 0, as_stream(stream));
}

unsigned blocks_at_once(UpdateKernel& kernel) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), kNoUpdate);
  const bool kept = device < kDevices;
  unsigned blocks = kept ? kernel.resident[device].load(std::memory_order_relaxed) : 0;
  if (blocks == 0) {
    int each = 0, multiprocessors = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel.function, kThreads, 0), kNoUpdate);
    check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kNoUpdate);
    blocks = static_cast<unsigned>(std::max(1, each * multiprocessors));
    if (kept) kernel.resident[device].store(blocks, std::memory_order_relaxed);
  }
  return blocks;
}

// CUDA blocks for this many groups: no more than run at once, because they loop over the rest. The result of a group does not depend on it.
unsigned grid(UpdateKernel& kernel, std::size_t groups) {
  constexpr std::size_t groups_per_block = kThreads / 8;
  return static_cast<unsigned>(std::min<std::size_t>((groups + groups_per_block - 1) / groups_per_block, blocks_at_once(kernel)));
}

}  // namespace

std::string unavailable_reason(int device) {
  int before = 0, now = 0;
  cudaError_t error = cudaGetDevice(&before), way_back = cudaSuccess;
  if (error == cudaSuccess) {
    if (device != before) error = cudaSetDevice(device);
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, add_in_order_kernel);
    way_back = cudaGetDevice(&now);  // to set a device makes a context there, so only where it is another one
    if (way_back == cudaSuccess && now != before) way_back = cudaSetDevice(before);
  }
  if (error == cudaSuccess && way_back == cudaSuccess) return "";
  cudaGetLastError();  // the answer is the return value
  if (way_back != cudaSuccess) {
    return "the thread could not go back to device " + std::to_string(before) + ": " + cudaGetErrorString(way_back);
  }
  const bool no_code = error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion;
  return std::string(cudaGetErrorString(error)) + (no_code ? "; build the package with CUDAARCHS=native" : "");
}

void ignore_captures() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;  // of the driver's, so torch's calls on this thread go by it, too
  if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) cudaGetLastError();
}

void squared_norm(const void* values, Dtype dtype, std::size_t n, double* block_sums, double* total, std::uintptr_t stream) {
  if (n == 0) return;
  const std::size_t blocks = norm_blocks(n);
  const unsigned cuda_blocks = static_cast<unsigned>((blocks * kLanes + kNormThreads - 1) / kNormThreads);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    check_cuda(launched(block_sums_kernel<T>, cuda_blocks, kNormThreads, stream, static_cast<const T*>(values), n, block_sums), kNoNorm);
  });
  check_cuda(launched(add_in_order_kernel, 1, kThreads, stream, block_sums, blocks, total), kNoNorm);
}

void update(Rule rule, const Chunk& chunk, std::size_t begin, std::size_t end, const Hyper& hyper, std::uintptr_t stream) {
  struct Ready {
    void (*function)(Launch);
    unsigned blocks;
    Launch launch;
  };
  // Whatever can fail is asked first, and loads the code: the first launch changes memory.
  std::vector<Ready> all;
  cut<Family<UpdateKernel, MakeKernels>>(rule, chunk, begin, end, hyper, [&](UpdateKernel* kernel, const Launch& launch) {
    all.push_back({kernel->function, grid(*kernel, launch.count), launch});
  });
  for (const Ready& each : all) {
    const char* const what = &each == all.data() ? kNoUpdate : "a part of update was launched, and the rest could not be";
    check_cuda(launched(each.function, each.blocks, kThreads, stream, each.launch), what);
  }
}

}  // namespace infinity::cuda
