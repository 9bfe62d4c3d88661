// Executes device requests through one io_uring, owned by one thread: it fills the ring, submits everything in one
// system call, waits, and checks every completion. Submitters reach it through an eventfd that the ring itself reads.
#include "engine.h"

#ifndef INFINITY_HAVE_LIBURING

#include <stdexcept>

namespace infinity::aio {

namespace {
constexpr const char* kReason = "built without liburing";
}

bool io_uring_available(std::string* reason) {
  if (reason) *reason = kReason;
  return false;
}

std::unique_ptr<Engine> make_io_uring(const Options&) { throw std::runtime_error(kReason); }

}  // namespace infinity::aio

#else

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace infinity::aio {

namespace {

class Ring {
 public:
  explicit Ring(unsigned entries) {
    int result = -EINVAL;
#ifdef IORING_SETUP_DEFER_TASKRUN
    // Completions are then handled when this thread waits, not by interrupting it. Kernels before 6.1 say EINVAL.
    result = io_uring_queue_init(entries, &ring_, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
#endif
    if (result == -EINVAL) result = io_uring_queue_init(entries, &ring_, 0);
    if (result < 0) throw std::runtime_error(std::string("io_uring_setup: ") + std::strerror(-result));
    if (!(ring_.features & IORING_FEAT_EXT_ARG)) {  // also implies READ and WRITE
      io_uring_queue_exit(&ring_);
      throw std::runtime_error("io_uring is older than Linux 5.11");
    }
  }
  ~Ring() { io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void prepare(const Call& call, void* tag) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    // The ring has an entry for every slot and one for the eventfd, so it is never full.
    if (!entry) throw std::logic_error("the submission ring is full");
    const auto bytes = static_cast<unsigned>(call.bytes);
    if (call.operation == Operation::read)
      io_uring_prep_read(entry, call.descriptor, call.memory, bytes, call.offset);
    else
      io_uring_prep_write(entry, call.descriptor, call.memory, bytes, call.offset);
    io_uring_sqe_set_data(entry, tag);
  }

  // Submits what was prepared and waits for a completion or the time given.
  void submit_and_wait(Clock::time_point until) {
    __kernel_timespec timeout{};
    const bool timed = until != Clock::time_point::max();
    if (timed) {
      const auto left = std::max(std::chrono::nanoseconds(until - Clock::now()), std::chrono::nanoseconds(0)).count();
      timeout.tv_sec = left / 1'000'000'000;
      timeout.tv_nsec = left % 1'000'000'000;
    }
    io_uring_cqe* first;
    const int result = io_uring_submit_and_wait_timeout(&ring_, &first, 1, timed ? &timeout : nullptr, nullptr);
    // Not submitted or not waited for: the caller's loop comes back. Anything else means that we misuse the ring.
    if (result >= 0 || result == -ETIME || result == -EINTR || result == -EAGAIN || result == -EBUSY) return;
    throw std::system_error(-result, std::generic_category(), "io_uring_enter");
  }

  template <class Handler>
  void for_each_completion(Handler handle) {
    io_uring_cqe* completion;
    while (io_uring_peek_cqe(&ring_, &completion) == 0) {
      void* tag = io_uring_cqe_get_data(completion);
      const int result = completion->res;
      io_uring_cqe_seen(&ring_, completion);
      handle(tag, result);
    }
  }

 private:
  io_uring ring_;
};

class Uring final : public QueueEngine {
 public:
  explicit Uring(const Options& options) : QueueEngine(options), bell_(::eventfd(0, EFD_CLOEXEC)) {
    if (bell_.number < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    // The thread that makes a SINGLE_ISSUER ring is the only one that may use it, so it also reports the failure.
    std::promise<void> started;
    std::future<void> outcome = started.get_future();
    owner_ = std::thread([this, started = std::move(started)]() mutable { own(std::move(started)); });
    try {
      outcome.get();
    } catch (...) {
      owner_.join();
      throw;
    }
  }
  ~Uring() override {
    stop();
    owner_.join();
  }
  const char* kind() const override { return "io_uring"; }

 private:
  void wake() override {
    if (!asleep_ && !stopping_) return;
    asleep_ = false;
    ::eventfd_write(bell_.number, 1);  // fails only at 2^64 - 2 unread rings
  }

  void own(std::promise<void> started) {
    std::unique_ptr<Ring> ring;
    try {
      ring = std::make_unique<Ring>(options_.depth + 1);
    } catch (...) {
      started.set_exception(std::current_exception());
      return;
    }
    started.set_value();
    loop(*ring);
  }

  // Without a handler on purpose: after a misused ring nobody knows what the device still writes to, so an exception
  // ends the process and names the reason.
  void loop(Ring& ring) noexcept {
    std::uint64_t rung;
    const Call listen{Operation::read, bell_.number, 0, &rung, sizeof rung};
    ring.prepare(listen, nullptr);
    for (;;) {
      auto not_before = Clock::time_point::max();
      while (Request* request = start(&not_before)) ring.prepare(request->call(), request);
      ring.submit_and_wait(not_before);
      bool stopped = false;
      ring.for_each_completion([&](void* tag, int result) {
        if (tag) return complete(static_cast<Request*>(tag), result);
        if (result < 0 && result != -EINTR && result != -EAGAIN)
          throw std::system_error(-result, std::generic_category(), "read of the eventfd");
        stopped = stopping();  // stop() always rings, so no read into `rung` is left behind
        if (!stopped) ring.prepare(listen, nullptr);
      });
      if (stopped) return;
    }
  }

  Request* start(Clock::time_point* not_before) {
    std::lock_guard<std::mutex> lock(mutex_);
    Request* request = next(not_before);
    asleep_ = request == nullptr;  // the next submit() rings
    return request;
  }

  bool stopping() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return stopping_;
  }

  const Descriptor bell_;
  bool asleep_ = false;  // guarded by mutex_
  std::thread owner_;
};

}  // namespace

bool io_uring_available(std::string* reason) {
  try {
    Ring ring(2);
    return true;
  } catch (const std::runtime_error& error) {
    if (reason) *reason = error.what();
    return false;
  }
}

std::unique_ptr<Engine> make_io_uring(const Options& options) { return std::make_unique<Uring>(options); }

}  // namespace infinity::aio

#endif
