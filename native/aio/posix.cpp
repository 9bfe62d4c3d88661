// Executes device requests with pread and pwrite on a few threads: works on every kernel and in every container.
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "engine.h"

namespace infinity::aio {

namespace {

class Posix final : public QueueEngine {
 public:
  explicit Posix(const Options& options) : QueueEngine(options) {
    try {
      for (unsigned i = 0; i < options.threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
      join();
      throw;
    }
  }
  ~Posix() override { join(); }
  const char* kind() const override { return "posix"; }
  void register_memory(void*, std::size_t) override {}
  void forget_memory(void*) override {}

 private:
  void wake() override { stopping_ ? work_.notify_all() : work_.notify_one(); }

  bool registered(const void*, std::size_t) const override { return false; }

  void join() {
    stop();
    for (std::thread& worker : workers_) worker.join();
  }

  static int execute(const Call& call) {
    const auto offset = static_cast<off_t>(call.offset);
    const ssize_t result = call.operation == Operation::read
                               ? ::pread(call.descriptor, call.memory, call.bytes, offset)
                               : ::pwrite(call.descriptor, call.memory, call.bytes, offset);
    return result < 0 ? -errno : static_cast<int>(result);
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      auto not_before = Clock::time_point::max();
      if (Request* request = next(&not_before)) {
        if (has_work()) work_.notify_one();  // one submit() wakes one worker, and a large request feeds them all
        lock.unlock();
        Completion completion{request, execute(request->call())};
        complete(&completion, 1);
        lock.lock();
      } else if (stopping_) {
        return;
      } else if (not_before == Clock::time_point::max()) {
        work_.wait(lock);
      } else {
        work_.wait_until(lock, not_before);
      }
    }
  }

  std::condition_variable work_;
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Engine> make_posix(const Options& options) { return std::make_unique<Posix>(options); }

}  // namespace infinity::aio
