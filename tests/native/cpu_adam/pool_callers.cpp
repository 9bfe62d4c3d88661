// Does a pool used by several threads at once do every element of every call exactly once, and does it start and stop cleanly?
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
  for (std::size_t n = 0; n < 300; ++n) {
    const std::size_t grain = n % 5 + 1;
    std::vector<int> counts(n);
    pool.run(n, grain, [&](std::size_t begin, std::size_t end) {
      check(begin % grain == 0 && (end % grain == 0 || end == n), "ranges are cut at multiples of the grain");
      for (std::size_t i = begin; i < end; ++i) ++counts[i];
    });
    for (const int count : counts) check(count == 1, "every element is visited once");
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

  bool refused = false;
  try {
    Pool none(0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  check(refused, "a pool of no threads is refused");
  return failures == 0 ? 0 : 1;
}
