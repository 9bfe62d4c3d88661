#include "pool.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "float_environment.h"

namespace infinity::cpu_adam {
namespace {

constexpr std::size_t kSlice = 32768;  // elements: some ten microseconds of work

int at_least_one(int threads) {
  if (threads < 1) throw std::invalid_argument("a pool needs at least one thread");
  return threads;
}

}  // namespace

Pool::Pool(int threads)
    : threads_(at_least_one(threads)), spins_(static_cast<unsigned>(threads) <= std::thread::hardware_concurrency()),
      shares_(std::make_unique<Share[]>(static_cast<std::size_t>(threads))) {
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
  for (int share = 0; share < threads_; ++share) shares_[share].next = boundary(job, share);
  gate_ += kOpen;
  {
    std::lock_guard lock(mutex_);
    ++serial_;
  }
  start_.notify_all();
  take_part(job, 0);
  gate_ -= kOpen;  // every slice is taken
  const auto alone = [this] { return gate_ == 0; };
  if (spin(alone)) return;
  std::unique_lock lock(mutex_);
  asleep_ = true;
  done_.wait(lock, alone);
  asleep_ = false;
}

void Pool::work(int index) {
  for (unsigned long seen = 0;;) {
    const auto called = [&] { return serial_ != seen; };
    if (!spin(called)) {
      std::unique_lock lock(mutex_);
      start_.wait(lock, called);
    }
    if (stop_) return;
    seen = serial_;
    if (gate_.fetch_add(kInside) & kOpen) take_part(job_, index);
    if (gate_.fetch_sub(kInside) == kInside && asleep_) {
      std::lock_guard lock(mutex_);
      done_.notify_one();
    }
  }
}

// Takes slices until there are none: first of its own share, then of the others'.
void Pool::take_part(const Job& job, int index) noexcept {
  const DefaultFloatEnvironment environment;
  const std::size_t slice = (kSlice + job.grain - 1) / job.grain * job.grain;
  for (int i = 0; i < threads_; ++i) {
    const int share = (index + i) % threads_;
    const std::size_t end = boundary(job, share + 1);
    std::atomic<std::size_t>& next = shares_[share].next;
    while (next < end) {
      const std::size_t begin = next.fetch_add(slice);
      if (begin < end) job.call(job.task, begin, std::min(begin + slice, end));
    }
  }
}

std::size_t Pool::boundary(const Job& job, int share) const {
  const std::size_t grains = job.n / job.grain + (job.n % job.grain != 0);
  return std::min(job.n, grains * static_cast<std::size_t>(share) / static_cast<std::size_t>(threads_) * job.grain);
}

// Whether the condition became true while this thread polled it. Another thread on this CPU, perhaps the caller, goes first. There is
// no PAUSE in the loop, because a hypervisor may take the CPU away for it. Waking then took 110 microseconds instead of 1 (KVM on AMD).
template <class Condition>
bool Pool::spin(Condition condition) const {
  if (condition()) return true;
  if (!spins_) return false;
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
  do {
    for (int i = 0; i < 64; ++i) {
      if (condition()) return true;
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

}  // namespace infinity::cpu_adam
