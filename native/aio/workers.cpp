#include "workers.h"

namespace infinity::aio {

void WorkerEngine::start() {
  try {
    for (unsigned i = 0; i < options_.threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (...) {
    join();
    throw;
  }
}

void WorkerEngine::join() {
  stop();
  for (std::thread& worker : workers_) worker.join();
}

void WorkerEngine::work() {
  begin();
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

}  // namespace infinity::aio
