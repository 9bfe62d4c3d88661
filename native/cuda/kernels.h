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
//   Earlier errors?      CUDA's last error of another library on this thread is neither reported nor cleared by a call that succeeds. A
//                        call that fails leaves none set. A sticky error is returned by every call of CUDA, so by these.
//   Lifetimes?           All memory outlives the work on the stream. Nothing is allocated here. The number of CUDA blocks of a kernel
//                        that a device runs at once is kept. CUDA is asked for it before the first launch there.
//
// Functions that are not needed here. Nothing is unpacked, because gathered parameters are views into the flat buffer. Nothing is packed,
// because hooks bring gradients one at a time, and torch's copy moves each to its place, with the cast. torch adds up gradients that stay in
// device memory. A scaled gradient is unscaled where update() reads it (Hyper::grad_scale), and squared_norm() says whether all of it is
// finite, so there is no other pass over it. Links and drives check their bytes themselves, so no CRC checks them again. Checkpoints are
// checked on the host.
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

// For a thread of our own, on its device: it ignores captures of graphs by other threads from now on. By default a thread may neither wait
// for an event nor allocate while another one captures in CUDA's global mode; such a call fails, and breaks that capture. In the
// thread-local mode only captures of this thread forbid that. Reports no error: a later call of the thread meets it.
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
