// A machine with a device of its own, played by the host: memory that only the device may touch, and streams that are
// threads. It knows no torch.
#pragma once

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace queued {

// The addresses that tensors show are never backed by memory: a host thread that follows one ends the process, as with a
// GPU. What lies there is `shadow` further on, where streams work.
class Memory {
 public:
  Memory() : device_(reserve(PROT_NONE)), shadow_(reserve(PROT_READ | PROT_WRITE)) {}

  bool holds(const void* address) const {
    const char* at = static_cast<const char*>(address);
    return device_ <= at && at < device_ + kBytes;
  }

  char* shadow(const void* address) const { return shadow_ + (static_cast<const char*>(address) - device_); }

  void* allocate(std::size_t nbytes) {
    const std::size_t size = rounded(nbytes);
    const std::lock_guard lock(mutex_);
    std::vector<char*>& free = free_[size];
    if (!free.empty()) {
      char* found = free.back();
      free.pop_back();
      return found;
    }
    if (end_ + size > kBytes) throw std::runtime_error("the simulated device has no memory left");
    return device_ + std::exchange(end_, end_ + size);
  }

  void give_back(void* address, std::size_t nbytes) {
    const std::lock_guard lock(mutex_);
    free_[rounded(nbytes)].push_back(static_cast<char*>(address));
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 36;

  static char* reserve(int protection) {
    void* found = mmap(nullptr, kBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) throw std::runtime_error("no addresses for the simulated device");
    return static_cast<char*>(found);
  }

  static std::size_t rounded(std::size_t nbytes) {
    std::size_t size = 512;
    while (size < nbytes) size *= 2;
    return size;
  }

  char* device_;
  char* shadow_;
  std::mutex mutex_;
  std::size_t end_ = 0;
  std::map<std::size_t, std::vector<char*>> free_;
};

// One recording of an event: streams and the host wait for it.
class Recording {
 public:
  bool done() {
    const std::lock_guard lock(mutex_);
    return done_;
  }

  void end() {
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

enum class Kind { compute, upload, download, order };  // `order` takes no time: it waits, records, or frees

struct Task {
  Kind kind;
  std::size_t nbytes;
  std::function<void()> run;
};

// How long a task takes, at least. `random` draws from 0 to twice of it, so that streams overtake each other in all ways.
struct Pace {
  std::uint64_t seed = 0;
  bool random = false;
  double compute_us = 0;
  double copy_us = 0;
  double bytes_per_us = 0;  // of a copy; 0: no limit

  double microseconds(const Task& task) const {
    if (task.kind == Kind::order) return 0;
    if (task.kind == Kind::compute) return compute_us;
    return copy_us + (bytes_per_us > 0 ? static_cast<double>(task.nbytes) / bytes_per_us : 0);
  }
};

struct Counts {
  std::map<std::int64_t, std::int64_t> host_waits;  // by thread, of those that had to wait
  std::map<std::int64_t, std::int64_t> careless_calls;  // by thread, of those that would break a graph that another one captures
  std::int64_t stream_waits = 0;
  std::array<std::int64_t, 4> tasks{};
  std::array<std::int64_t, 4> nbytes{};
  std::array<std::int64_t, 4> under_way{};
  std::array<std::vector<std::int64_t>, 4> depths;  // how many of its kind were under way when each one ended
};

// Whether this thread ignores what others capture, as it does in CUDA's thread-local mode.
inline thread_local bool ignores_captures = false;

// What all streams share.
struct Machine {
  Memory memory;
  std::mutex mutex;  // of all that follows
  Pace pace;
  Counts counts;
  std::map<std::uintptr_t, std::size_t> pinned;
  std::string error;  // of a task; told by the next wait of the host
  std::shared_ptr<Recording> gate;  // what a stream waits for that is held

  bool is_pinned(const void* address) {
    const std::lock_guard lock(mutex);
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    auto after = pinned.upper_bound(at);
    return after != pinned.begin() && (--after, at < after->first + after->second);
  }

  // As CUDA does, says whether it was done: no byte is registered twice.
  bool pin(std::uintptr_t address, std::size_t nbytes) {
    const std::lock_guard lock(mutex);
    if (!registrations_in(address, nbytes).empty()) return false;
    pinned[address] = nbytes;
    return true;
  }

  bool unpin(std::uintptr_t address) {
    const std::lock_guard lock(mutex);
    return pinned.erase(address) == 1;
  }

  // The driver refuses a copy that leaves the registration that it begins in, or ends in.
  void check_copy(const void* address, std::size_t nbytes) {
    const std::lock_guard lock(mutex);
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    for (const auto& [start, length] : registrations_in(begin, nbytes))
      if (begin < start || begin + nbytes > start + length) throw std::runtime_error("invalid argument: a copy crosses the end of a registration");
  }

  // Every call of the host on the device begins with this.
  void note_call() {
    if (ignores_captures) return;
    const std::lock_guard lock(mutex);
    ++counts.careless_calls[gettid()];
  }

  void check() {
    const std::lock_guard lock(mutex);
    if (!error.empty()) throw std::runtime_error("on the simulated device: " + std::exchange(error, ""));
  }

  void wait(Recording& recording) {
    note_call();
    if (!recording.done()) {
      {
        const std::lock_guard lock(mutex);
        ++counts.host_waits[gettid()];
      }
      recording.wait();
    }
    check();
  }

 private:
  // Those that share a byte with [address, address + nbytes).
  std::map<std::uintptr_t, std::size_t> registrations_in(std::uintptr_t address, std::size_t nbytes) {
    std::map<std::uintptr_t, std::size_t> found;
    for (auto at = pinned.lower_bound(address + nbytes); at != pinned.begin();) {
      --at;
      if (at->first + at->second <= address) break;
      found.insert(*at);
    }
    return found;
  }
};

inline Machine& machine() {
  static Machine* the_one = new Machine;  // never deleted: streams outlive the interpreter
  return *the_one;
}

// A queue and the thread that works on it, one task after the other.
class Stream {
 public:
  explicit Stream(std::int64_t number) : number_(number) {
    std::thread([this] { run(); }).detach();
  }

  void push(Kind kind, std::size_t nbytes, std::function<void()> work) {
    machine().note_call();
    if (kind != Kind::order) {
      const std::lock_guard lock(machine().mutex);
      ++machine().counts.tasks[static_cast<int>(kind)];
      machine().counts.nbytes[static_cast<int>(kind)] += static_cast<std::int64_t>(nbytes);
      ++machine().counts.under_way[static_cast<int>(kind)];
    }
    const std::lock_guard lock(mutex_);
    tasks_.push_back({kind, nbytes, std::move(work)});
    changed_.notify_one();
  }

  std::shared_ptr<Recording> record() {
    auto recording = std::make_shared<Recording>();
    push(Kind::order, 0, [recording] { recording->end(); });
    return recording;
  }

  void wait_for(std::shared_ptr<Recording> recording) {
    {
      const std::lock_guard lock(machine().mutex);
      ++machine().counts.stream_waits;
    }
    push(Kind::order, 0, [recording = std::move(recording)] { recording->wait(); });
  }

 private:
  void run() {
    prctl(PR_SET_NAME, "queued-stream");
    prctl(PR_SET_TIMERSLACK, 1000);
    std::mt19937_64 random(number_);
    std::uint64_t seed = 0;
    while (true) {
      Task task = pop();
      Pace pace;
      {
        const std::lock_guard lock(machine().mutex);
        pace = machine().pace;
      }
      if (pace.seed != std::exchange(seed, pace.seed)) random.seed(pace.seed * 1000003 + static_cast<std::uint64_t>(number_));
      const auto begin = std::chrono::steady_clock::now();
      double duration = pace.microseconds(task);
      if (pace.random && duration > 0) {
        // Before the work: what comes too early shows.
        duration *= std::uniform_real_distribution<double>(0, 2)(random);
        std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(duration));
      }
      try {
        task.run();
      } catch (const std::exception& error) {
        const std::lock_guard lock(machine().mutex);
        machine().error = error.what();
      }
      if (!pace.random && duration > 0) std::this_thread::sleep_until(begin + std::chrono::duration<double, std::micro>(duration));
      if (task.kind != Kind::order) {
        const std::lock_guard lock(machine().mutex);
        const int kind = static_cast<int>(task.kind);
        machine().counts.depths[kind].push_back(machine().counts.under_way[kind]--);
      }
    }
  }

  Task pop() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }

  std::int64_t number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
};

}  // namespace queued
