#include "pool.h"

#include <algorithm>
#include <stdexcept>

#include "float_environment.h"

namespace infinity::cpu_adam {

Pool::Pool(int threads) : threads_(threads) {
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
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(const Job& job) {
  std::lock_guard one_caller(callers_);
  {
    std::lock_guard lock(mutex_);
    job_ = job;
    running_ = threads_ - 1;
    ++serial_;
  }
  start_.notify_all();
  run_share(job, 0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
}

void Pool::work(int index) {
  unsigned long seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return stop_ || serial_ != seen; });
    if (stop_) return;
    seen = serial_;
    const Job job = job_;
    lock.unlock();
    run_share(job, index);
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
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
