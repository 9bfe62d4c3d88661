#include "faults.h"

#include <algorithm>
#include <stdexcept>

namespace infinity::aio {

namespace {

// The throttle may catch up on wake-ups this late, so that the rate is met and not only bounded.
constexpr std::chrono::milliseconds kThrottleSlack{2};

Clock::duration ticks(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

void check(const Faults& faults) {
  const auto share = [](double fraction, const char* message) {
    if (!(fraction >= 0 && fraction <= 1)) throw std::invalid_argument(message);
  };
  share(faults.short_fraction, "short_fraction must be 0 to 1");
  share(faults.error_fraction, "error_fraction must be 0 to 1");
  share(faults.delay_fraction, "delay_fraction must be 0 to 1");
  if (faults.short_unit < 1) throw std::invalid_argument("short_unit must be at least 1");
  if (!(faults.delay_seconds >= 0 && faults.delay_seconds <= 60)) throw std::invalid_argument("delay_seconds must be 0 to 60");
  if (!(faults.bytes_per_second >= 0)) throw std::invalid_argument("bytes_per_second must not be negative");
  if (faults.fail_errno <= 0) throw std::invalid_argument("fail_errno must be positive");
  if (faults.errnos.empty()) throw std::invalid_argument("errnos must not be empty");
  for (const int code : faults.errnos)
    if (code <= 0) throw std::invalid_argument("errnos must be positive");
}

void FaultPlan::apply(Request& request) {
  if (chance(faults_.short_fraction)) {
    // More than was moved of this block before, so that every repetition gets further, and less than all.
    const std::size_t least = request.repeated() / faults_.short_unit + 1;
    const std::size_t most = (request.remaining() - 1) / faults_.short_unit;
    if (least <= most) request.shorten(faults_.short_unit * (least + random_() % (most - least + 1)));
  }
  const bool reading = request.operation() == Operation::read;
  if ((reading ? reads_++ : writes_++) == (reading ? faults_.fail_read_at : faults_.fail_write_at))
    request.injected = faults_.fail_errno;
  else if (chance(faults_.error_fraction))
    request.injected = faults_.errnos[random_() % faults_.errnos.size()];
  if (faults_.bytes_per_second > 0) {
    free_at_ = std::max(free_at_, Clock::now() - kThrottleSlack) +
               ticks(static_cast<double>(request.bytes) / faults_.bytes_per_second);
    request.due = free_at_;
  }
  if (chance(faults_.delay_fraction)) {
    request.due = std::max(request.due, Clock::now()) +
                  ticks(std::uniform_real_distribution<>(0, faults_.delay_seconds)(random_));
    request.late = true;
  }
}

int FaultPlan::ring_call() { return ring_calls_++ == faults_.fail_ring_at ? faults_.fail_errno : 0; }

}  // namespace infinity::aio
