// The runtime of CUDA, as far as native/cuda calls it, with calls that fail when a test wants them to. Errors stay until cudaGetLastError.
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "on_cpu.h"
#include "threads.h"

namespace on_cpu {

Error error = Error::none;

namespace {

struct Work {
  unsigned blocks, threads;
  std::function<void()> body;
};

struct Stream {
  int device;
  std::deque<Work> queue;
};

struct Runtime {
  std::recursive_mutex mutex;
  std::map<std::string, long> settings = {{"devices", 1}, {"multiprocessors", 2}, {"order", 0}, {"queued", 0}, {"error", 0}};
  std::map<std::string, std::pair<long, cudaError_t>> faults;
  std::map<std::string, long> calls;
  std::vector<std::unique_ptr<Stream>> streams;
  Stream default_stream{0, {}};
  std::set<const void*> kernels;
  long launches = 0;
  void (*push)(std::uintptr_t, void (*)(void*), void*) = nullptr;
};

Runtime& runtime() {
  static auto* const it = new Runtime;
  return *it;
}
using Lock = std::lock_guard<std::recursive_mutex>;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaError_t failed(cudaError_t error) { return last_error = error; }

// Every call begins with this: the error with which it fails.
cudaError_t called(const char* function) {
  const Lock lock(runtime().mutex);
  ++runtime().calls[function];
  if (runtime().settings["devices"] == 0) return failed(cudaErrorInsufficientDriver);
  const auto fault = runtime().faults.find(function);
  if (fault == runtime().faults.end() || fault->second.first-- > 0) return cudaSuccess;
  const cudaError_t error = fault->second.second;
  runtime().faults.erase(fault);
  return failed(error);
}

cudaError_t checked_device(int device) {
  return device >= 0 && device < runtime().settings["devices"] ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

Stream* find(const void* stream) {
  if (!stream) return &runtime().default_stream;
  for (const auto& known : runtime().streams) {
    if (known.get() == stream) return known.get();
  }
  return nullptr;
}

void run(const Work& work) {
  long order;
  {
    const Lock lock(runtime().mutex);
    order = runtime().settings["order"];
  }
  run_grid(work.blocks, work.threads, order, work.body);
}

void drain(Stream& stream) {
  while (!stream.queue.empty()) {
    run(stream.queue.front());
    stream.queue.pop_front();
  }
}

}  // namespace

cudaError_t find_attributes(cudaFuncAttributes* attributes) {
  if (const cudaError_t error = called("cudaFuncGetAttributes")) return error;
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t find_occupancy(int* blocks, int threads) {
  if (const cudaError_t error = called("cudaOccupancyMaxActiveBlocksPerMultiprocessor")) return error;
  if (threads < 1 || threads > 1024) return failed(cudaErrorInvalidValue);
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t launch(const void* kernel, unsigned blocks, unsigned threads, cudaStream_t stream, std::function<void()> body) {
  if (const cudaError_t error = called("cudaLaunchKernel")) return error;
  const Lock lock(runtime().mutex);
  Runtime& r = runtime();
  if (blocks < 1 || blocks > 0x7fffffff || threads < 1 || threads > 1024 || threads % 32 != 0) return failed(cudaErrorInvalidConfiguration);
  Work work{blocks, threads, std::move(body)};
  if (r.push) {
    const auto run_it = [](void* it) { run(*std::unique_ptr<Work>(static_cast<Work*>(it))); };
    r.push(reinterpret_cast<std::uintptr_t>(stream), run_it, new Work(std::move(work)));
  } else {
    Stream* const known = find(stream);
    if (!known || (stream && known->device != current_device)) return failed(cudaErrorInvalidResourceHandle);
    known->queue.push_back(std::move(work));
    if (r.settings["queued"] == 0) drain(*known);
  }
  ++r.launches;
  r.kernels.insert(kernel);
  return cudaSuccess;
}

}  // namespace on_cpu

using namespace on_cpu;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  if (const cudaError_t error = called("cudaGetDevice")) return error;
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = called("cudaSetDevice")) return error;
  if (const cudaError_t error = checked_device(device)) return error;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  if (const cudaError_t error = called("cudaDeviceGetAttribute")) return error;
  if (const cudaError_t error = checked_device(device)) return error;
  *value = static_cast<int>(runtime().settings["multiprocessors"]);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (const cudaError_t error = called("cudaThreadExchangeStreamCaptureMode")) return error;
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInsufficientDriver: return "there is no driver";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorUnsupportedPtxVersion: return "the driver is older than the PTX";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    default: return "an error that a test made";
  }
}

long on_cpu_set(const char* name, long value) {
  const Lock lock(runtime().mutex);
  const auto setting = runtime().settings.find(name);
  if (setting == runtime().settings.end()) give_up(std::string("there is no setting ") + name);
  if (setting->first == "error") error = static_cast<Error>(value);
  return std::exchange(setting->second, value);
}

void on_cpu_fail(const char* function, long after, int error) {
  const Lock lock(runtime().mutex);
  runtime().faults[function] = {after, static_cast<cudaError_t>(error)};
}

void on_cpu_heal() {
  const Lock lock(runtime().mutex);
  runtime().faults.clear();
  last_error = cudaSuccess;
}

long on_cpu_calls(const char* function) {
  const Lock lock(runtime().mutex);
  return runtime().calls[function];
}

void* on_cpu_stream(int device) {
  const Lock lock(runtime().mutex);
  return runtime().streams.emplace_back(std::make_unique<Stream>(Stream{device, {}})).get();
}

long on_cpu_waiting(void* stream) {
  const Lock lock(runtime().mutex);
  const Stream* const known = find(stream);
  return known ? static_cast<long>(known->queue.size()) : -1;
}

void on_cpu_synchronize(void* stream) {
  const Lock lock(runtime().mutex);
  if (Stream* const known = find(stream)) drain(*known);
}

long on_cpu_launches() { return runtime().launches; }
long on_cpu_kernels() { return static_cast<long>(runtime().kernels.size()); }
int on_cpu_capture_mode() { return capture_mode; }

void on_cpu_push_to(void (*push)(std::uintptr_t, void (*)(void*), void*)) {
  const Lock lock(runtime().mutex);
  runtime().push = push;
}
}
