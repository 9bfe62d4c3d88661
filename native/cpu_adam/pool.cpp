#include "pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "float_environment.h"

namespace infinity::cpu_adam {
Pool::Pool(int threads) : threads_(threads), spins_(static_cast<unsigned>(threads) <= std::thread::hardware_concurrency()) {
  if (threads < 1) throw std::invalid_argument("a pool needs at least one thread");
  try {
    for (int index = 1; index < threads; ++index) workers_.emplace_back(&Pool::work, this, index);
  } catch (...) {
    stop();  // the threads already started must be joined before the exception leaves
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    ++serial_;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(const Job& job) {
  std::lock_guard one_caller(callers_);
  job_ = job;
  running_ = threads_ - 1;
  {
    std::lock_guard lock(mutex_);
    ++serial_;
  }
  start_.notify_all();
  run_share(job, 0);
  const auto finished = [this] { return running_ == 0; };
  if (spin(finished)) return;
  std::unique_lock lock(mutex_);
  done_.wait(lock, finished);
}

void Pool::work(int index) {
  for (unsigned long seen = 0;;) {
    const auto called = [&] { return serial_ != seen; };
    if (!spin(called)) {
      std::unique_lock lock(mutex_);
      start_.wait(lock, called);
    }
    if (stop_) return;
    ++seen;  // the next job does not come before this one is done
    run_share(job_, index);
    if (--running_ == 0) {
      std::lock_guard lock(mutex_);
      done_.notify_one();
    }
  }
}

// Whether the condition came true while it was asked for. There is no PAUSE in the loop: a hypervisor may take the CPU away for it, and
// waking then took 110 microseconds where it takes 1 without (KVM on AMD).
template <class Condition>
bool Pool::spin(Condition condition) const {
  if (condition()) return true;
  if (!spins_) return false;
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
  do {
    for (int i = 0; i < 64; ++i) {
      if (condition()) return true;
    }
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

void Pool::run_share(const Job& job, int index) const noexcept {
  const std::size_t grains = job.n / job.grain + (job.n % job.grain != 0);
  const auto boundary = [&](int i) { return std::min(job.n, grains * i / threads_ * job.grain); };
  const std::size_t begin = boundary(index), end = boundary(index + 1);
  if (begin == end) return;
  DefaultFloatEnvironment environment;
  job.call(job.task, begin, end);
}

}  // namespace infinity::cpu_adam
