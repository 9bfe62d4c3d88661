// The fault decorator: decides, by seed, what happens to a device request instead of or before its execution.
#pragma once

#include <cstdint>
#include <random>

#include "engine.h"

namespace infinity::aio {

// Throws std::invalid_argument.
void check(const Faults& faults);

// Guarded by the engine's mutex.
class FaultPlan {
 public:
  explicit FaultPlan(const Faults& faults) : faults_(faults), random_(faults.seed) {}

  void apply(Request& request);  // to a device request that is about to be ready
  int ring_call();               // errno to give instead of the next system call on the ring, or 0

 private:
  bool chance(double fraction) { return fraction > 0 && std::uniform_real_distribution<>()(random_) < fraction; }

  const Faults faults_;
  std::int64_t reads_ = 0, writes_ = 0, ring_calls_ = 0;
  std::mt19937_64 random_;
  Clock::time_point free_at_;
};

}  // namespace infinity::aio
