// The CUDA twins of native/cpu_adam. The updates are the same source (rules.h, moments.h, noise.h, update.h), compiled for one more kind of
// register (octet.h), and nothing is contracted to a fused multiply-add that rounds otherwise: a number does not depend on the device that
// computed it.
//
// The questions a caller has:
//   Which thread?        Any. The caller's current CUDA device is the one that owns the stream and the memory.
//   Does it block?       No: every function enqueues kernels on `stream` (a cudaStream_t as an integer; 0 is the default
//                        stream) and returns. It may wait for room in the driver's launch queue.
//   Queue full?          See above.
//   Completion seen?     By the caller's own event or by synchronizing the stream.
//   What is the result?  In device memory. A call of CUDA that fails throws std::runtime_error with its reason. Then nothing was updated,
//                        no total has changed, and the call can be made again, unless the message begins with "a part of update": an
//                        update is up to two launches, and more for some chunks of 2^29 elements or more, and one behind the first has
//                        failed. All else that can fail is asked before the first. An error inside a kernel shows at the caller's next
//                        synchronization, and at every later call.
//   Errors of others?    What another library left as CUDA's last error on this thread is neither reported nor cleared by a call that
//                        succeeds. One that fails leaves none set. A sticky error is returned by every call of CUDA, so by these.
//   Who outlives whom?   All memory outlives the work on the stream. Nothing is allocated here. What is kept is how many CUDA blocks of
//                        a kernel a device runs at once, which is asked of CUDA before its first launch there.
//
// What is not here, because nobody needs it: gathered parameters are views into the flat buffer, so nothing is unpacked; gradients come
// from hooks one at a time and torch's copy takes each to its place at once, with the cast, so nothing is left to pack; torch adds up those
// that stay in device memory; a scaled gradient is unscaled where update() reads it (Hyper::grad_scale), and squared_norm() says whether all
// of it is finite, so there is no other pass over it; and what moves over links and to drives, which check it themselves, is not checked
// again by a CRC: checkpoints are, on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../cpu_adam/cpu_adam.h"

namespace infinity::cuda {

using cpu_adam::Chunk;
using cpu_adam::Dtype;
using cpu_adam::Hyper;
using cpu_adam::Rule;

// Why kernels cannot run on this device (no driver, driver older than the toolkit, no such device, no code for it); empty when they can.
// Loads the code for it. The thread keeps its device, or the reason says that it could not go back; to go back to a device without a
// context makes one there. Leaves no error of CUDA set.
std::string unavailable_reason(int device);

// For a thread of our own, on its device: graphs that other threads capture are none of its business from now on. By default a thread may
// neither wait for an event nor allocate while any other one captures in CUDA's global mode; such a call fails, and breaks that capture.
// In the thread-local mode only what this thread captures itself forbids that. Says nothing: who cannot be told meets the error later.
void ignore_captures();

// Doubles of device memory that squared_norm() needs as `block_sums` for `n` values.
constexpr std::size_t norm_blocks(std::size_t n) { return (n + cpu_adam::kNormBlock - 1) / cpu_adam::kNormBlock; }

// *total = cpu_adam::squared_norm(values, dtype, n, *total); `total` and `block_sums` are device memory. Finite exactly when *total was
// and all values are.
void squared_norm(const void* values, Dtype dtype, std::size_t n, double* block_sums, double* total, std::uintptr_t stream);

// cpu_adam::update on device memory, with the same checks. Fastest where every block lies at a multiple of 16 bytes, with a gradient;
// elsewhere, and for the one or two groups of 32 of which only a part is updated, elements are copied one by one.
void update(Rule rule, const Chunk& chunk, std::size_t begin, std::size_t end, const Hyper& hyper, std::uintptr_t stream);

}  // namespace infinity::cuda
