// Asynchronous file I/O with one contract and three engines: io_uring (through liburing) and POSIX threads for host memory, and
// cuFile (GPUDirect Storage), which only reads, into the memory of a GPU.
//
// The six questions a caller has:
//   Which thread?        Any thread may call submit(), wait() and done(); the engine has its own thread or threads.
//   Does it block?       submit() returns at once unless the queue is full; wait() blocks until that ticket is
//                        complete.
//   Queue full?          submit() blocks until there is room (bounded, back-pressure); it does not fail for that. Each
//                        priority has a queue of its own, so background requests never block a foreground submit().
//   Completion seen?     Through the ticket: wait() or done(). No callbacks.
//   What is the result?  Result: errno (0 = success) and the bytes moved. error == 0 if and only if done == asked. A
//                        short transfer and EINTR/EAGAIN are continued inside, at most kTries times in a row without
//                        progress; error == 0 is never reported for fewer bytes. A read that meets the end of the file
//                        gives kEndOfFile with the bytes before it. When the ring itself fails, that errno is the
//                        result of every ticket, then and later.
//   Lifetimes?           The caller's memory outlives the ticket's completion. A File may go sooner: its descriptor
//                        stays open until its last request is done. A Ticket may outlive its Engine, whose
//                        destructor drains: it waits for all transfers in flight, then stops.
//
// Files are opened with O_DIRECT where the file system allows it. Callers may pass any address, offset and length:
// aligned spans go straight to the device in requests of `request_bytes`, the rest through aligned bounce buffers
// (a partial block at either end of a write is read, patched and written back). Two concurrent writes that touch the
// same 4096-byte block of a file are the caller's to order. With O_DIRECT the size grows to the aligned end of a write.
//
// Requests are taken in order, foreground before background; a batch is one request made of several parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace infinity::aio {

constexpr std::size_t kAlignment = 4096;  // bytes: enough for every device with 512- or 4096-byte logical blocks
constexpr int kEndOfFile = -1;            // Result::error when the file ends before the asked bytes

constexpr int kTries = 64;                // then a device request that makes no progress gives its errno (0.3 s)

enum class Operation { read, write };

// Background requests are cut into device requests when no foreground request is queued, and once in a while (one device
// request in 32) when there always is one, so that they end too. They use at most half of the slots and buffers. A caller that
// waits for one calls Engine::promote().
enum class Priority { foreground, background };

// One part of a batch.
struct Part {
  std::uint64_t offset = 0;  // in the file, bytes
  void* memory = nullptr;
  std::uint64_t bytes = 0;
};

struct Result {
  int error = 0;            // 0, an errno, or kEndOfFile
  std::uint64_t asked = 0;  // bytes
  std::uint64_t done = 0;   // bytes, contiguous from the start of the request; of a batch: of its parts one after the other
};

// Where an engine may be made to fail or to be slow; for tests and benchmarks. The defaults change nothing.
// Faults act on the engine's own device requests (pieces of at most request_bytes), counted from 0 in submission order; a
// repetition counts again.
struct Faults {
  std::uint64_t seed = 0;
  double short_fraction = 0;          // this share of device requests moves a part only; continued
  std::size_t short_unit = kAlignment;  // bytes: the parts are multiples of this; 1: any number of bytes
  std::int64_t fail_read_at = -1;     // the n-th device read from now returns fail_errno; -1: never
  std::int64_t fail_write_at = -1;    // likewise for writes
  int fail_errno = 5;                 // EIO
  double error_fraction = 0;          // this share of device requests returns one of `errnos` instead of being executed
  std::vector<int> errnos = {5};
  double delay_fraction = 0;          // this share starts up to `delay_seconds` late; others overtake it
  double delay_seconds = 0;
  std::int64_t fail_ring_at = -1;     // io_uring only: the n-th system call from now returns fail_errno
  double bytes_per_second = 0;        // 0: full speed; else a token bucket shared by reads and writes delays them
};

// The defaults are measured (benchmarks/aio.py): from 4 MiB on a request costs the least CPU per byte, and eight of them keep
// the device busy. More than max(32 MiB, 4 request_bytes) are never in flight, so that a demand read does not wait long.
struct Options {
  unsigned depth = 64;                     // device requests in flight
  unsigned threads = 4;                    // workers of the POSIX engine
  std::size_t request_bytes = 4u << 20;    // size of one device request, a multiple of kAlignment, at most 64 MiB
};

struct Counters {
  std::uint64_t bytes_read = 0, bytes_written = 0;      // asked by callers and done
  std::uint64_t device_requests = 0, continued = 0;     // `continued`: short transfers, EINTR, EAGAIN
  std::uint64_t bounced_bytes = 0;                      // moved through bounce buffers
  std::uint64_t fixed_requests = 0;                     // device requests in registered memory
};

class Descriptor;  // internal: an open descriptor, shared by the File and its requests in flight

// An open file, used by one thread at a time (requests on it may come from any). `direct()`: O_DIRECT is in force.
class File {
 public:
  // Opens for reading and writing, creating with `mode` (octal permissions) when `create`; without `create`, a file that may
  // only be read is opened for reading, and writes give EBADF. `name`: what path() and errors say instead of `path`. Throws
  // std::system_error.
  File(const std::string& path, bool create, unsigned mode, bool want_direct = true, const std::string& name = "");
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const std::shared_ptr<const Descriptor>& descriptor() const { return descriptor_; }
  bool direct() const { return direct_; }
  const std::string& path() const { return path_; }
  // All throw std::system_error.
  // Reserves blocks for [0, bytes) so that later writes there cannot meet ENOSPC; the size grows to at least `bytes`.
  void allocate(std::uint64_t bytes);
  std::uint64_t size() const;
  void truncate(std::uint64_t bytes);
  void sync();  // returns when data and size are on the device

 private:
  std::string path_;
  std::shared_ptr<const Descriptor> descriptor_;
  bool direct_ = false;
};

class Transfer;     // internal: the state of one ticket
class QueueEngine;  // internal: it reads tickets

// One request in flight; copyable, all copies name the same request.
class Ticket {
 public:
  Ticket() = default;
  bool done() const;
  Result wait() const;  // blocks; may be called many times, by any thread
  explicit Ticket(std::shared_ptr<Transfer> state) : state_(std::move(state)) {}

 private:
  friend class QueueEngine;
  std::shared_ptr<Transfer> state_;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* kind() const = 0;  // "io_uring" or "posix"
  // Both throw std::invalid_argument when some memory is null or offset + bytes is past the largest file. The second takes
  // the lock once, and its one ticket is complete when all parts are. Parts after a failure are not started.
  virtual Ticket submit(Operation operation, File& file, std::uint64_t offset, void* memory, std::size_t bytes,
                        Priority priority = Priority::foreground) = 0;
  virtual Ticket submit(Operation operation, File& file, std::vector<Part> parts,
                        Priority priority = Priority::foreground) = 0;
  // Moves a background request of this engine to the end of the foreground queue. Does not block. Does nothing for any other
  // request.
  virtual void promote(const Ticket& ticket) = 0;
  // io_uring: pins [memory, memory + bytes) until it is forgotten, so that requests inside need not do so each time.
  // The caller forgets memory before unmapping it. Throws std::system_error, with nothing registered, when the kernel refuses
  // (ENOMEM: RLIMIT_MEMLOCK; EINVAL: a kernel before 5.19), std::invalid_argument when it overlaps registered memory.
  // Everything works without; the POSIX engine has no use for it and does nothing.
  virtual void register_memory(void* memory, std::size_t bytes) = 0;
  // `memory`: as registered; otherwise nothing happens. Requests in flight keep their pages until they complete.
  virtual void forget_memory(void* memory) = 0;
  virtual Counters counters() const = 0;
  // Takes effect for requests submitted afterwards; resets counting. Throws std::invalid_argument.
  virtual void set_faults(const Faults& faults) = 0;
  virtual void drain() = 0;                           // blocks until nothing is in flight
};

// True when the library was built with liburing and the running kernel lets this process make and enter a ring; else
// `reason` (which may be null) says why not.
bool io_uring_available(std::string* reason);

// Both throw std::invalid_argument on bad options; the first throws std::runtime_error when io_uring cannot be had.
std::unique_ptr<Engine> make_io_uring(const Options& options);
std::unique_ptr<Engine> make_posix(const Options& options);

// libcufile with its driver open, and the memory registered with it. Through it, a drive writes into the memory of a GPU, past
// host memory. Copies through host memory ("compatibility mode") are turned off. If libcufile does not allow that, there is no
// CuFile. Used by one thread at a time. The engines made with it keep it.
class CuFile {
 public:
  // Takes the first of `libraries` (names or paths, as dlopen takes them) that can be loaded. Throws std::runtime_error that
  // says why a drive cannot write to a GPU here.
  explicit CuFile(const std::vector<std::string>& libraries);
  ~CuFile();
  CuFile(const CuFile&) = delete;
  CuFile& operator=(const CuFile&) = delete;
  // Once: where reads may go, which outlives this object. Throws std::runtime_error when it is refused.
  void register_memory(void* memory, std::size_t bytes);
  bool holds(const void* memory, std::size_t bytes) const;
  void* memory() const { return memory_; }
  struct Functions;  // internal
  const Functions& functions() const { return *functions_; }

 private:
  std::unique_ptr<Functions> functions_;
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

// Reads of `file` into registered memory, on `options.threads` threads; offsets, sizes and addresses are multiples of kAlignment.
// To be made by a thread whose CUDA context the memory belongs to. A Result::error of 5000 or more is one of cuFile's own. Throws
// std::runtime_error when the file is not open with O_DIRECT, or cannot be read so.
std::unique_ptr<Engine> make_cufile(const Options& options, std::shared_ptr<CuFile> cufile, const File& file);

}  // namespace infinity::aio
