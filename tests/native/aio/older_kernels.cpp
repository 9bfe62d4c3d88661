// Where the kernel refuses the best ways to make a ring, does the engine take the next one, and work?
#include <liburing.h>

#include <cerrno>
#include <vector>

#include "check.h"

using namespace infinity::aio;

// The linker puts this in the place of the function of liburing.
extern "C" int __real_io_uring_queue_init(unsigned entries, io_uring* ring, unsigned flags);

namespace {
const std::vector<unsigned> kWays{
#ifdef IORING_SETUP_DEFER_TASKRUN
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
#endif
#ifdef IORING_SETUP_COOP_TASKRUN
    IORING_SETUP_COOP_TASKRUN,
#endif
    0,
};
unsigned unknown = 0;  // flags that the kernel refuses
std::vector<unsigned> asked;
}  // namespace

extern "C" int __wrap_io_uring_queue_init(unsigned entries, io_uring* ring, unsigned flags) {
  asked.push_back(flags);
  return flags & unknown ? -EINVAL : __real_io_uring_queue_init(entries, ring, flags);
}

int main() {
  if (!io_uring_available(nullptr)) return 77;
  Scratch scratch("aio_older_kernels");
  File file(scratch.path, true, 0600);
  Pages source(64 * kAlignment), back(64 * kAlignment);
  for (std::size_t i = 0; i < 64 * kAlignment; ++i) source.data[i] = static_cast<unsigned char>(i * 13 + i / 4096);
  for (std::size_t refused = 0; refused < kWays.size(); ++refused) {
    unknown = 0;
    for (std::size_t way = 0; way < refused; ++way) unknown |= kWays[way];
    asked.clear();
    const auto engine = make_io_uring({});
    CHECK(asked == std::vector<unsigned>(kWays.begin(), kWays.begin() + static_cast<std::ptrdiff_t>(refused) + 1));
    CHECK(engine->submit(Operation::write, file, 0, source.data, 64 * kAlignment).wait().error == 0);
    std::fill(back.data, back.data + 64 * kAlignment, static_cast<unsigned char>(refused));
    CHECK(engine->submit(Operation::read, file, 0, back.data, 64 * kAlignment).wait().error == 0);
    CHECK(std::equal(source.data, source.data + 64 * kAlignment, back.data));
  }
  return 0;
}
