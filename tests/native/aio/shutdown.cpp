// May the File go while its requests are in flight, and the Engine before its tickets, with nothing lost?
#include <algorithm>

#include "check.h"

using namespace infinity::aio;

int main(int count, char** words) {
  return ask(count, words, [](const Make& make, const std::string& name) {
    constexpr std::size_t kBytes = 64 * kAlignment;
    Pages pages(kBytes), back(kBytes);
    for (int round = 0; round < 50; ++round) {
      Scratch scratch(name);
      std::fill_n(pages.data, kBytes, static_cast<unsigned char>(round + 1));
      std::vector<Ticket> tickets;
      {
        auto file = std::make_unique<File>(scratch.path, true, 0600);
        const auto engine = make(Options{8, 2, kAlignment});
        for (std::size_t at = 0; at < kBytes; at += 4 * kAlignment)
          tickets.push_back(engine->submit(Operation::write, *file, at, pages.data + at, 4 * kAlignment));
        file.reset();
      }
      for (const Ticket& ticket : tickets) CHECK(ticket.done() && ticket.wait().error == 0);

      File file(scratch.path, false, 0);
      CHECK(make(Options{})->submit(Operation::read, file, 0, back.data, kBytes).wait().error == 0);
      CHECK(std::equal(pages.data, pages.data + kBytes, back.data));
      make(Options{});  // an engine that was never used stops too
    }
  });
}
