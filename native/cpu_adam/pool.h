// The worker threads of the CPU kernels.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace infinity::cpu_adam {

// Owns `threads - 1` worker threads from construction to destruction; the calling thread does the remaining share itself. Any thread
// may call `run`; calls are served one at a time, and a caller waits while another's call is running. Destroying the pool joins the
// workers and must not overlap a call. Threads do not survive fork(): a pool belongs to the process that made it.
//
// [Note: late threads]
// A sleeping thread takes 50 microseconds to wake, and one whose CPU is busy with something else milliseconds; a call of half a million
// elements takes 200 microseconds. So a thread that waits, for the next call or for the end of this one, asks for 100 microseconds
// before it sleeps; each thread has a share of its own, always the same. A thread that is done with it takes slices of other shares. A call
// ends when all slices are done, even if some worker is still asleep. Nothing is allocated for a call.
class Pool {
 public:
  explicit Pool(int threads);  // throws std::invalid_argument when threads < 1, std::system_error when a thread cannot start
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Cuts [0, n) into one share per thread, of nearly equal length, shares into slices, all at multiples of `grain`, and calls the task
  // once for every slice; returns when all are done. The task runs in the default floating-point environment (round to nearest,
  // subnormals kept) whatever the calling thread's is, and must not throw.
  template <class Task>
  void run(std::size_t n, std::size_t grain, const Task& task) {
    run(Job{n, grain, [](const void* it, std::size_t begin, std::size_t end) { (*static_cast<const Task*>(it))(begin, end); }, &task});
  }

 private:
  struct Job {
    std::size_t n, grain;
    void (*call)(const void* task, std::size_t begin, std::size_t end);
    const void* task;
  };
  struct alignas(64) Share {
    std::atomic<std::size_t> next{0};  // the first element that no thread has taken
  };

  void run(const Job& job);
  void work(int index);
  void take_part(const Job& job, int index) noexcept;
  std::size_t boundary(const Job& job, int share) const;
  template <class Condition>
  bool spin(Condition condition) const;
  void stop() noexcept;

  const int threads_;
  const bool spins_;                       // there is a CPU for every thread
  const std::unique_ptr<Share[]> shares_;  // `run` writes it and job_ while the gate is shut and no thread is inside
  Job job_{};
  std::mutex callers_;  // held for a whole call; taken before mutex_

  // Workers enter a job through the gate while it is open, without a lock: kOpen, plus kInside for each that is inside. One that finds it
  // shut leaves at once and touches nothing else.
  static constexpr long kOpen = 1, kInside = 2;
  std::atomic<long> gate_{0};
  std::atomic<unsigned long> serial_{0};  // counts jobs: a worker looks when it differs from the last one it saw
  std::atomic<bool> stop_{false};         // set before serial_ changes for the last time

  std::mutex mutex_;  // for sleeping threads: serial_ changes under it, and the last worker notifies under it
  std::condition_variable start_, done_;
  std::atomic<bool> asleep_{false};  // the caller sleeps until the gate is empty

  std::vector<std::thread> workers_;  // touched by the constructor and destructor only
};

}  // namespace infinity::cpu_adam
