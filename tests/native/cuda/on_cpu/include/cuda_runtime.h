// What native/cuda uses of CUDA, for an ordinary C++ compiler: threads.cpp runs the kernels, runtime.cpp is the runtime.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#define __host__
#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)

// The two words of native/cuda/device.h for which C++ has no substitute.
#define INFINITY_APPROXIMATE(instruction, result, x) result = on_cpu::approximate(instruction, x)
#define INFINITY_SHARED(type, name, count) \
  type(&name)[count] = *static_cast<type(*)[count]>(on_cpu::shared_memory(__LINE__, sizeof(type[count])))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  explicit dim3(unsigned size = 1) : x(size) {}
};
// Of the thread that runs. One grid runs at a time, in one thread of the CPU.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

// Loaded and stored at once, so the undefined-behaviour sanitizer reports an address that is not aligned to the whole.
struct alignas(16) [[gnu::may_alias]] float4 {
  float x, y, z, w;
};
struct alignas(8) [[gnu::may_alias]] uint2 {
  std::uint32_t x, y;
};

using cudaStream_t = struct CUstream_st*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorInvalidResourceHandle = 400,
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
struct cudaFuncAttributes {
  int maxThreadsPerBlock;
};

extern "C" {
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
}

namespace on_cpu {

cudaError_t find_attributes(cudaFuncAttributes* attributes);
cudaError_t find_occupancy(int* blocks, int threads);
cudaError_t launch(const void* kernel, unsigned blocks, unsigned threads, cudaStream_t stream, std::function<void()> body);

// For all threads of a block the same memory, by the line that declares it.
void* shared_memory(int line, std::size_t bytes);

// Returns what the lane `from` of the warp brought, once all lanes of the mask are there.
enum class Exchange { shfl, shfl_xor, syncwarp };
std::uint64_t exchange(Exchange what, unsigned mask, std::uint64_t mine, unsigned from, int line);
void sync_threads(int line);

// How far an approximation is from the number next to the exact one.
enum class Error { none, above, below, mixed, several_units };
extern Error error;

inline float off_by(float x, int units) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (bits << 1 != 0 && bits << 1 < 0xfe000000) bits += static_cast<std::uint32_t>(units);
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// An instruction `.approx.ftz.f32` of PTX: numbers below 2^-126 are zeros to it, and its error is within what PTX allows.
inline float approximate(const char* instruction, float x) {
  const auto flushed = [](float y) { return std::fabs(y) < 0x1p-126f ? std::copysign(0.0f, y) : y; };
  const double from = flushed(x);
  const bool inverse = instruction[0] == 'r', root = instruction[1] != 'c';  // sqrt, rcp, rsqrt
  double exact = root ? std::sqrt(from) : from;
  if (inverse) exact = 1 / exact;
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const Error how = error != Error::mixed ? error : bits * 0x9e3779b9u >> 31 ? Error::above : Error::below;
  const double most = root ? 0x1p-24 : 0x1p-25;  // before the result is rounded
  if (std::isfinite(exact) && how == Error::above) exact *= 1 + most;
  if (std::isfinite(exact) && how == Error::below) exact *= 1 - most;
  const auto result = flushed(static_cast<float>(exact));
  return how == Error::several_units ? off_by(result, static_cast<int>(bits * 0x9e3779b9u % 9) - 4) : result;
}

template <class T>
T exchanged(Exchange what, unsigned mask, T mine, unsigned from, int line) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &mine, sizeof mine);
  bits = exchange(what, mask, bits, from, line);
  std::memcpy(&mine, &bits, sizeof mine);
  return mine;
}

template <class... Parameters, std::size_t... I>
std::tuple<Parameters...> copied(void** arguments, std::index_sequence<I...>) {
  return {*static_cast<Parameters*>(arguments[I])...};
}

}  // namespace on_cpu

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  return on_cpu::find_attributes(attributes);
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int threads, std::size_t) {
  return on_cpu::find_occupancy(blocks, threads);
}
// Arguments are copied before it returns.
template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, void** arguments, std::size_t, cudaStream_t stream) {
  const auto copies = on_cpu::copied<Parameters...>(arguments, std::index_sequence_for<Parameters...>());
  return on_cpu::launch(reinterpret_cast<const void*>(kernel), blocks.x, threads.x, stream, [=] { std::apply(kernel, copies); });
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const unsigned part = threadIdx.x % 32 / static_cast<unsigned>(width) * static_cast<unsigned>(width);
  return on_cpu::exchanged(on_cpu::Exchange::shfl, mask, value, part + static_cast<unsigned>(source % width), line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int apart, int line = __builtin_LINE()) {
  return on_cpu::exchanged(on_cpu::Exchange::shfl_xor, mask, value, threadIdx.x % 32 ^ static_cast<unsigned>(apart), line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  on_cpu::exchange(on_cpu::Exchange::syncwarp, mask, 0, threadIdx.x % 32, line);
}
inline void __syncthreads(int line = __builtin_LINE()) { on_cpu::sync_threads(line); }

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __saturatef(float x) { return x > 1 ? 1.0f : x > 0 ? x : 0.0f; }
inline double __longlong_as_double(long long bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// Each digit of `choice`, the lowest first, names a byte, 0 to 3 of x and 4 to 7 of y; from 8 on its sign in all bits.
inline std::uint32_t __byte_perm(std::uint32_t x, std::uint32_t y, std::uint32_t choice) {
  const std::uint64_t both = std::uint64_t{y} << 32 | x;
  std::uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t digit = choice >> 4 * i & 15, byte = static_cast<std::uint32_t>(both >> 8 * (digit & 7)) & 0xff;
    bytes |= (digit < 8 ? byte : byte >= 0x80 ? 0xff : 0) << 8 * i;
  }
  return bytes;
}
