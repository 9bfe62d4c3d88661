// Does a pool used by several threads at once do every element of every call exactly once, does a call go on without late workers, and does
// a pool start and stop cleanly?
#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pool.h"

using infinity::cpu_adam::Pool;

namespace {

std::atomic<int> failures{0};

void check(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed: %s\n", what);
  ++failures;
}

// The counts are plain integers: the thread sanitizer proves that ranges do not overlap and that `run` waits for all of them.
void call_repeatedly(Pool& pool) {
  for (std::size_t round = 0; round < 310; ++round) {
    const std::size_t grain = round % 5 + 1, n = round < 300 ? round : 100'003 * (round - 299);  // the last ones in many slices
    std::vector<int> counts(n);
    pool.run(n, grain, [&](std::size_t begin, std::size_t end) {
      check(begin % grain == 0 && (end % grain == 0 || end == n), "ranges are cut at multiples of the grain");
      for (std::size_t i = begin; i < end; ++i) ++counts[i];
    });
    for (const int count : counts) check(count == 1, "every element is visited once");
  }
}

// A worker stays in its first slice until everything else is done: the caller has to do that, the rest of the worker's share included.
void take_from_the_late() {
  Pool pool(2);
  const std::size_t n = 1'000'000;
  for (int call = 0; call < 20; ++call) {
    std::atomic<std::size_t> done{0};
    const std::thread::id caller = std::this_thread::get_id();
    pool.run(n, 64, [&](std::size_t begin, std::size_t end) {
      while (std::this_thread::get_id() != caller && done < n - (end - begin)) std::this_thread::yield();
      done += end - begin;
    });
    check(done == n, "the caller does what a late worker does not");
  }
}

}  // namespace

int main() {
  for (int threads = 1; threads <= 5; ++threads) {
    Pool pool(threads);
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back([&] { call_repeatedly(pool); });
    for (std::thread& caller : callers) caller.join();
  }
  for (int i = 0; i < 200; ++i) Pool unused(4);

  take_from_the_late();

  bool refused = false;
  try {
    Pool none(0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  check(refused, "a pool of no threads is refused");
  return failures == 0 ? 0 : 1;
}
