// Does every mix of offsets, lengths, addresses, short transfers and EINTR give exactly the bytes of a model in memory?
#include <algorithm>
#include <cerrno>
#include <random>

#include "check.h"

using namespace infinity::aio;

namespace {

constexpr std::size_t kLargest = 96 * 1024;

void round_trip(const Make& make, const std::string& name, bool direct, unsigned seed) {
  Scratch scratch(name);
  File file(scratch.path, true, 0600, direct);
  const auto engine = make(Options{4, 3, 4 * kAlignment});
  std::mt19937 random(seed);
  const auto below = [&](std::size_t bound) { return random() % bound; };
  Bytes model(2 * kLargest, 0);
  file.truncate(model.size());

  Faults faults;
  faults.seed = seed;
  faults.short_fraction = 0.5;
  faults.fail_errno = EINTR;
  Pages pages(kLargest + kAlignment);
  for (int step = 0; step < 300; ++step) {
    faults.fail_read_at = faults.fail_write_at = static_cast<std::int64_t>(below(4));
    engine->set_faults(faults);
    const bool aligned = below(3) == 0;
    const std::size_t unit = aligned ? kAlignment : 1;
    unsigned char* memory = pages.data + below(kAlignment) / unit * unit;
    const std::size_t offset = below(kLargest) / unit * unit;
    const std::size_t bytes = std::min(below(kLargest), model.size() - offset) / unit * unit;
    Result result;
    if (below(2)) {
      for (std::size_t i = 0; i < bytes; ++i) memory[i] = static_cast<unsigned char>(random());
      std::copy_n(memory, bytes, model.begin() + static_cast<std::ptrdiff_t>(offset));
      result = engine->submit(Operation::write, file, offset, memory, bytes).wait();
    } else {
      result = engine->submit(Operation::read, file, offset, memory, bytes).wait();
      CHECK(std::equal(memory, memory + bytes, model.begin() + static_cast<std::ptrdiff_t>(offset)));
    }
    CHECK(result.error == 0 && result.asked == bytes && result.done == bytes);
  }
  CHECK(engine->counters().continued > 0);

  engine->set_faults({});
  Bytes all(model.size());
  CHECK(engine->submit(Operation::read, file, 0, all.data(), all.size()).wait().error == 0);
  CHECK(all == model);
}

}  // namespace

int main(int count, char** words) {
  return ask(count, words, [](const Make& make, const std::string& name) {
    for (unsigned seed = 0; seed < 4; ++seed) {
      round_trip(make, name, true, seed);
      round_trip(make, name, false, seed);
    }
  });
}
