// What both engines share: everything except the execution of a device request.
//
// [Note: one path for every request]
// submit() queues a Transfer. `next()` cuts it into device requests, each in one of `depth` slots (Request), and an
// engine runs what next() gives it: `call()` says what to read or write, `complete()` takes the result. A short
// transfer, EINTR, and the write half of a read-modify-write all go back through next(), so retries, faults and the
// throttle are written once and nothing ever loops inside an engine.
//
// Nothing can deadlock: a slot takes its bounce buffer when it is cut and needs nothing else to finish, so slots and
// buffers always come back; a transfer that finds none free stays at the head of the queue until one does.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "aio.h"

namespace infinity::aio {

using Clock = std::chrono::steady_clock;

class Descriptor {
 public:
  explicit Descriptor(int number) : number(number) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  const int number;
};

struct FaultPlan;

// One caller's request. The engine's mutex guards it until finish(), which hands the outcome to wait().
class Transfer {
 public:
  Transfer(Operation operation, const File& file, std::uint64_t offset, void* memory, std::size_t bytes,
           std::shared_ptr<FaultPlan> faults);
  char* memory_at(std::uint64_t position) const { return memory + (position - offset); }
  void fail(std::uint64_t position, int code);  // the failure nearest to the start decides the result
  bool settled() const { return in_flight == 0 && (error_ != 0 || cursor == end); }
  bool failed() const { return error_ != 0; }
  std::uint64_t done_bytes() const { return done_until_ - offset; }
  void finish();

  bool finished() const { return finished_.load(std::memory_order_acquire); }
  Result wait();

  const Operation operation;
  const std::shared_ptr<const Descriptor> descriptor;
  const bool direct;
  const std::uint64_t offset, end;  // file offsets
  char* const memory;
  const std::shared_ptr<FaultPlan> faults;  // null: none
  std::uint64_t cursor;                     // file offset of the first byte that no device request covers yet
  unsigned in_flight = 0;                   // device requests

 private:
  int error_ = 0;
  std::uint64_t done_until_;
  std::atomic<bool> finished_{false};
  std::mutex mutex_;
  std::condition_variable wakeup_;
};

// What an engine executes.
struct Call {
  Operation operation;
  int descriptor;
  std::uint64_t offset;
  void* memory;
  std::size_t bytes;
};

enum class Progress { again, write_back, finished };  // write_back: the block was read, now patch and write it

// A slot for one device request. All positions are file offsets. The thread that took it from next() has it alone until
// complete().
class Request {
 public:
  void assign(std::shared_ptr<Transfer> of, std::uint64_t to, char* buffer);
  std::size_t remaining() const { return device_end_ - start(); }
  Operation operation() const { return filling_ ? Operation::read : transfer->operation; }
  Call call();
  Progress advance(int result);  // bytes moved or -errno

  std::shared_ptr<Transfer> transfer;
  std::uint64_t begin = 0, end = 0;  // the caller's bytes that this slot moves
  char* bounce = nullptr;            // null: straight from or to the caller's memory
  std::size_t limit = 0;             // bytes of the next call: remaining(), or fewer to inject a short transfer
  int injected = 0;                  // errno to give instead of executing the next call
  Clock::time_point due;             // the next call is not to start before (throttle)
  int error = 0;                     // once finished: why it stopped at `done_until`, or 0
  std::uint64_t done_until = 0;

 private:
  std::uint64_t start() const;
  std::uint64_t device_begin_ = 0, device_end_ = 0;  // what the device moves: whole blocks when bounced
  std::uint64_t reached_ = 0;                        // [device_begin_, reached_) has been moved
  bool filling_ = false;                             // reading the block that a write patches
};

class QueueEngine : public Engine {
 public:
  Ticket submit(Operation operation, File& file, std::uint64_t offset, void* memory, std::size_t bytes) final;
  Counters counters() const final;
  void set_faults(const Faults& faults) final;
  void drain() final;

 protected:
  explicit QueueEngine(const Options& options);

  // The next device request to start, or null; then `not_before` is lowered if the throttle is why. Needs mutex_.
  Request* next(Clock::time_point* not_before);
  bool has_work() const { return !ready_.empty() || !queue_.empty(); }  // needs mutex_
  void complete(Request* request, int result);  // bytes moved or -errno; takes mutex_
  void stop();              // drains, sets stopping_ and wakes; each engine's destructor calls it before it joins
  virtual void wake() = 0;  // there is work, or stopping_ was set; called with mutex_ held

  const Options options_;
  mutable std::mutex mutex_;
  bool stopping_ = false;

 private:
  bool cut();
  void make_ready(Request* request);
  void settle(Request* request, Progress progress);

  std::condition_variable room_, idle_;
  std::deque<std::shared_ptr<Transfer>> queue_;  // at most options_.depth; only the front is partly cut
  std::vector<Request> slots_;
  std::vector<Request*> free_, ready_;
  std::unique_ptr<char, void (*)(void*)> bounce_memory_;
  std::vector<char*> bounce_free_;
  std::shared_ptr<FaultPlan> faults_;
  Counters counters_;
  std::size_t outstanding_ = 0;  // transfers submitted and not finished
};

}  // namespace infinity::aio
