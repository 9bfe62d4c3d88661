// May the File go while its requests are in flight, and the Engine before its tickets, with nothing lost or left open?
#include <algorithm>
#include <filesystem>

#include "check.h"

using namespace infinity::aio;

namespace {

bool is_open(const std::string& path) {
  namespace fs = std::filesystem;
  const fs::path file = fs::canonical(path);
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the descriptor of this iteration itself
    if (fs::read_symlink(entry.path(), gone) == file) return true;
  }
  return false;
}

}  // namespace

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
        CHECK(is_open(scratch.path));
        file.reset();
        if (round % 2) {  // the engine goes on, and the tickets are kept
          for (const Ticket& ticket : tickets) ticket.wait();
          CHECK(!is_open(scratch.path));
        }
      }
      for (const Ticket& ticket : tickets) CHECK(ticket.done() && ticket.wait().error == 0);

      File file(scratch.path, false, 0);
      CHECK(make(Options{})->submit(Operation::read, file, 0, back.data, kBytes).wait().error == 0);
      CHECK(std::equal(pages.data, pages.data + kBytes, back.data));
      make(Options{});  // an engine that was never used stops too
    }
  });
}
