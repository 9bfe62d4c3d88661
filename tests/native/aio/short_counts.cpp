// Do short counts of every size, also inside a block, at every kind of place, still give exactly the bytes?
#include <algorithm>

#include "check.h"

using namespace infinity::aio;

int main(int count, char** words) {
  return ask(count, words, [](const Make& make, const std::string& name) {
    constexpr std::size_t kBytes = 2 * kAlignment;
    Scratch scratch(name);
    const auto engine = make(Options{4, 2, kBytes});
    for (const bool direct : {true, false}) {
      File file(scratch.path, true, 0600, direct);
      Bytes model(4 * kAlignment);
      for (std::size_t i = 0; i < model.size(); ++i) model[i] = static_cast<unsigned char>(i * 7 + i / 251);
      CHECK(engine->submit(Operation::write, file, 0, model.data(), model.size()).wait().error == 0);
      Pages pages(2 * kBytes);
      // From kAlignment on only one multiple is smaller than the request, so the device stops exactly there.
      for (std::size_t unit = 1; unit < kBytes; unit += direct ? 1 : 13) {
        Faults faults;
        faults.seed = unit;
        faults.short_fraction = 1;
        faults.short_unit = unit;
        engine->set_faults(faults);
        const std::size_t shift = unit % 3 == 0 ? unit % kAlignment : 0;  // bounced and patched, or straight
        const std::uint64_t offset = kAlignment + shift;
        unsigned char* memory = pages.data + (unit % 5 == 0 ? 1 : 0);
        std::fill_n(pages.data, 2 * kBytes, 0);
        const Result read = engine->submit(Operation::read, file, offset, memory, kBytes).wait();
        CHECK(read.error == 0 && read.done == kBytes);
        CHECK(std::equal(memory, memory + kBytes, model.data() + offset));
        std::fill_n(memory, kBytes, static_cast<unsigned char>(unit));
        std::fill_n(model.data() + offset, kBytes, static_cast<unsigned char>(unit));
        const Result written = engine->submit(Operation::write, file, offset, memory, kBytes).wait();
        CHECK(written.error == 0 && written.done == kBytes);
        if (unit % 64 == 0 || unit < 64) {
          Bytes all(model.size());
          engine->set_faults({});
          CHECK(engine->submit(Operation::read, file, 0, all.data(), all.size()).wait().error == 0);
          CHECK(all == model);
        }
      }
      engine->set_faults({});
      Bytes all(model.size());
      CHECK(engine->submit(Operation::read, file, 0, all.data(), all.size()).wait().error == 0);
      CHECK(all == model);
      CHECK(engine->counters().continued > kBytes);
    }
  });
}
