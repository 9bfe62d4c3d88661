// An engine that executes device requests on a few threads, one call each.
#pragma once

#include <thread>

#include "engine.h"

namespace infinity::aio {

class WorkerEngine : public QueueEngine {
 public:
  void register_memory(void*, std::size_t) override {}
  void forget_memory(void*) override {}

 protected:
  explicit WorkerEngine(const Options& options) : QueueEngine(options) {}
  // The first in an engine's constructor, the second in its destructor: the threads call its execute().
  void start();
  void join();
  virtual int execute(const Call& call) = 0;  // bytes moved or -errno
  virtual void begin() {}                     // each thread, before its first call

 private:
  void wake() override { stopping_ ? work_.notify_all() : work_.notify_one(); }
  bool registered(const void*, std::size_t) const override { return false; }
  void work();

  std::condition_variable work_;
  std::vector<std::thread> workers_;
};

}  // namespace infinity::aio
