// The worker threads of the CPU kernels.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace infinity::cpu_adam {

// Owns `threads - 1` worker threads from construction to destruction; the calling thread does the remaining share itself. Any thread
// may call `run`; calls are served one at a time, and a caller waits while another's call is running. Destroying the pool joins the
// workers and must not overlap a call. Threads do not survive fork(): a pool belongs to the process that made it.
class Pool {
 public:
  explicit Pool(int threads);  // throws std::invalid_argument when threads < 1, std::system_error when a thread cannot start
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Cuts [0, n) into one range per thread, of nearly equal length and at multiples of `grain`, and calls the task once for every range
  // that is not empty; returns when all are done. The task runs in the default floating-point environment (round to nearest,
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

  void run(const Job& job);
  void work(int index);
  void run_share(const Job& job, int index) const noexcept;
  void stop() noexcept;

  const int threads_;
  std::mutex callers_;  // held for a whole call; taken before mutex_

  std::mutex mutex_;  // guards everything below
  std::condition_variable start_, done_;
  Job job_{};
  unsigned long serial_ = 0;  // counts jobs: a worker runs when it differs from the last one it saw
  int running_ = 0;           // workers that have not finished the current job
  bool stop_ = false;

  std::vector<std::thread> workers_;  // touched by the constructor and destructor only
};

}  // namespace infinity::cpu_adam
