// The common part of the engines: everything except the execution of a device request.
//
// [Note: one path for every request]
// submit() queues a Transfer. `next()` cuts it into device requests, each in one of `depth` slots (Request), and an
// engine runs the requests of next(): `call()` says what to read or write, `complete()` takes the result. A short
// transfer, EINTR, and the write half of a read-modify-write all go back through next(), so retries, faults and the
// throttle are written once and nothing ever loops inside an engine.
//
// Nothing can deadlock: a slot takes its bounce buffer when it is cut and needs nothing else to finish, so slots and
// buffers always come back; a transfer that finds none free stays at the head of its queue until one does. Background
// transfers wait in their own bounded queue and leave half of the slots and buffers to foreground transfers.
//
// [Note: ordinary memory]
// A virtual disk pays for each physically separate piece of a request: from 4 KiB pages this one reads 1.0-1.8 and writes
// 2.5-3.4 GB/s, from huge pages 2.9 and 6 (benchmarks/results/aio.json). Copying costs less than that, so on virtio large
// requests from ordinary pages go through the bounce buffers, which lie on huge pages. Elsewhere they go straight.
//
// [Note: options that were measured and left out]
// On that disk: reads and writes mixed 70/30 reach the time of reading and then writing the same bytes, so there are no phases;
// registered files change no rate, and the disk has no IOPOLL queues. SQPOLL reads requests of 1 MiB, 32 at a time, some 10%
// faster, for a thread that spins: 0.34 CPU seconds per GB and not 0.01, on cores that the optimizer wants.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "aio.h"
#include "memory.h"

namespace infinity::aio {

using Clock = std::chrono::steady_clock;

class Descriptor {
 public:
  Descriptor(int number, bool pays_per_page) : number(number), pays_per_page(pays_per_page) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  bool ends_at(std::uint64_t position) const;  // whether a read that moves nothing there has met the end of the file
  const int number;
  const bool pays_per_page;  // see [Note: ordinary memory]
};

class FaultPlan;

// One caller's request: parts of a file, one after the other. A `mark` is a number of bytes from the start of the first part.
// The engine's mutex guards it until finish(), which hands the outcome to wait().
class Transfer {
 public:
  Transfer(Operation operation, const File& file, std::vector<Part> parts, Priority priority,
           std::shared_ptr<FaultPlan> faults);
  const Part& part() const { return parts_[index_]; }  // the one that is being cut; not when all_cut()
  std::uint64_t cursor() const { return cursor_; }     // file offset of its first byte that no device request covers yet
  std::uint64_t mark() const { return before_ + (all_cut() ? 0 : cursor_ - part().offset); }
  void cut_until(std::uint64_t position);              // up to the end of part()
  bool all_cut() const { return index_ == parts_.size(); }
  void fail(std::uint64_t mark, int code);             // the failure nearest to the start decides the result
  bool settled() const { return in_flight == 0 && (error_ != 0 || all_cut()); }
  bool failed() const { return error_ != 0; }
  std::uint64_t done_bytes() const { return done_; }
  void finish();

  bool finished() const { return finished_.load(std::memory_order_acquire); }
  Result wait();

  const Operation operation;
  Priority priority;
  std::shared_ptr<const Descriptor> descriptor;  // null once it is finished
  const bool direct;
  const std::shared_ptr<FaultPlan> faults;  // null: none
  unsigned in_flight = 0;                   // device requests

 private:
  void skip_empty_parts();

  std::vector<Part> parts_;
  std::size_t index_ = 0;
  std::uint64_t before_ = 0;  // the mark of part()
  std::uint64_t cursor_ = 0;
  std::uint64_t asked_ = 0, done_ = 0;
  int error_ = 0;
  std::atomic<bool> finished_{false};
  std::mutex mutex_;
  std::condition_variable wakeup_;
};

// A device request for an engine.
struct Call {
  Operation operation;
  int descriptor;
  std::uint64_t offset;
  void* memory;
  std::size_t bytes;
  bool direct;
};

enum class Progress { again, write_back, finished };  // write_back: the block was read, now patch and write it

// A slot for one device request. All positions are file offsets. The thread that took it from next() has it alone until
// complete().
class Request {
 public:
  void assign(std::shared_ptr<Transfer> of, std::uint64_t to, char* buffer);  // of->cursor() to `to`
  std::size_t remaining() const { return device_end_ - start(); }
  std::size_t repeated() const { return reached_ - start(); }  // of remaining(): moved already, to be moved again
  Operation operation() const { return filling_ ? Operation::read : transfer->operation; }
  std::size_t covers() const { return device_end_ - device_begin_; }
  void prepare();                      // before each call: all that remains, no fault
  void shorten(std::size_t moved);     // the next call is to move so many bytes and not all
  Call call();
  bool copies() const { return bounce && covers() >= kLargeCopy; }  // in call() or in advance()
  Progress advance(int result);        // bytes moved or -errno
  void give_up(int code);              // instead of the result of a call that never came, or is not to be made

  std::shared_ptr<Transfer> transfer;  // null: the slot is free
  Priority priority;                   // of the queue that it was cut from, whose slots and bytes it counts among
  std::uint64_t begin = 0, end = 0;    // the caller's bytes that this slot moves
  std::uint64_t mark = 0;              // of `begin`
  char* bounce = nullptr;              // null: straight from or to the caller's memory
  std::size_t bytes = 0;               // of the next call
  int injected = 0;                    // errno to give instead of executing the next call
  bool fixed = false;                  // the next call goes through registered memory
  Clock::time_point due;               // the next call is not to start before
  bool late = false;                   // others may overtake it until then
  unsigned tries = 0;                  // calls in a row that moved nothing
  int error = 0;                       // once finished: why it stopped at `done_until`, or 0
  std::uint64_t done_until = 0;

 private:
  static constexpr std::size_t kLargeCopy = 64 << 10;

  std::uint64_t start() const;
  std::uint64_t certain() const;
  bool no_progress();  // counts; false when it was tried often enough

  char* memory_ = nullptr;                           // the caller's, for `begin`
  std::uint64_t device_begin_ = 0, device_end_ = 0;  // what the device moves: whole blocks when bounced
  std::uint64_t reached_ = 0;                        // [device_begin_, reached_) has been moved
  std::size_t most_ = 0;                             // of the next call's bytes, so many count
  bool filling_ = false;                             // reading the block that a write patches
};

class QueueEngine : public Engine {
 public:
  Ticket submit(Operation operation, File& file, std::uint64_t offset, void* memory, std::size_t bytes,
                Priority priority) final;
  Ticket submit(Operation operation, File& file, std::vector<Part> parts, Priority priority) final;
  void promote(const Ticket& ticket) final;
  Counters counters() const final;
  void set_faults(const Faults& faults) final;
  void drain() final;

 protected:
  struct Completion {
    Request* request;
    int result;  // bytes moved or -errno
  };

  explicit QueueEngine(const Options& options);

  // The next device request to start, or null; then `not_before` is lowered if time is why. Needs mutex_.
  Request* next(Clock::time_point* not_before);
  bool has_work() const;  // needs mutex_
  void complete(Completion* first, std::size_t count);  // takes mutex_
  int ring_fault();                                     // see FaultPlan::ring_call(); needs mutex_
  // Ends everything with `code`, now and later: what waits, what is cut, and what never came back. Takes mutex_.
  void abandon(int code);
  void stop();              // drains, sets stopping_ and wakes; each engine's destructor calls it before it joins
  // Throws std::invalid_argument for what this engine cannot do.
  virtual void admit(Operation, const File&, const Part&) const {}
  virtual void wake() = 0;  // there is work, or stopping_ was set; called with mutex_ held
  // Whether the pages are pinned, so that going straight costs nothing. Called by the thread that calls next().
  virtual bool registered(const void* memory, std::size_t bytes) const = 0;

  const Options options_;
  mutable std::mutex mutex_;
  bool stopping_ = false;
  int dead_ = 0;  // the errno of abandon()
  Counters counters_;

 private:
  struct Queue {
    std::deque<std::shared_ptr<Transfer>> transfers;  // at most options_.depth, besides promoted ones
    std::condition_variable room;
    std::size_t slots = 0, bytes = 0;                 // in use by its requests
    bool remove(const std::shared_ptr<Transfer>& transfer);  // false: it is not there
  };

  Queue& queue(Priority priority) { return queues_[static_cast<int>(priority)]; }
  bool cut();
  bool cut(Priority priority);
  void make_ready(Request* request);
  void settle(Request* request, Progress progress);
  void finish(const std::shared_ptr<Transfer>& transfer);

  std::condition_variable idle_;
  Queue queues_[2];
  unsigned passed_over_ = 0;  // foreground requests cut while background ones waited
  std::vector<Request> slots_;
  std::vector<Request*> free_, ready_;
  std::vector<Request*> late_;  // a heap, the earliest first
  const std::size_t window_;
  HugeBuffer bounce_memory_;
  std::vector<char*> bounce_free_[2];
  std::shared_ptr<FaultPlan> faults_;
  std::size_t outstanding_ = 0;  // transfers submitted and not finished
};

}  // namespace infinity::aio
