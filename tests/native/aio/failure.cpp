// Does a failing device request give its errno and exactly the bytes before it, and does the end of the file say so?
#include <algorithm>
#include <cerrno>

#include "check.h"

using namespace infinity::aio;

int main(int count, char** words) {
  return ask(count, words, [](const Make& make, const std::string& name) {
    constexpr std::size_t kPiece = 2 * kAlignment, kPieces = 9, kBytes = kPiece * kPieces;
    Scratch scratch(name);
    File file(scratch.path, true, 0600);
    const auto engine = make(Options{4, 4, kPiece});
    Pages pages(kBytes);
    std::fill_n(pages.data, kBytes, 7);
    CHECK(engine->submit(Operation::write, file, 0, pages.data, kBytes).wait().error == 0);

    for (std::size_t n = 0; n < kPieces; ++n) {
      Faults faults;
      faults.fail_read_at = static_cast<std::int64_t>(n);
      engine->set_faults(faults);
      std::fill_n(pages.data, kBytes, 0);
      const Result result = engine->submit(Operation::read, file, 0, pages.data, kBytes).wait();
      CHECK(result.error == EIO && result.asked == kBytes && result.done == n * kPiece);
      CHECK(std::count(pages.data, pages.data + result.done, 7) == static_cast<std::ptrdiff_t>(result.done));
      CHECK(engine->submit(Operation::read, file, 0, pages.data, kBytes).wait().error == 0);  // only once
    }
    engine->set_faults({});

    for (const std::size_t size : {kBytes, kBytes - 1000, std::size_t{1}}) {
      file.truncate(size);
      Bytes memory(kBytes + 10);
      const Result result = engine->submit(Operation::read, file, 0, memory.data(), memory.size()).wait();
      CHECK(result.error == kEndOfFile && result.done == size);
      CHECK(static_cast<std::size_t>(std::count(memory.begin(), memory.end(), 7)) == size);
      CHECK(engine->submit(Operation::read, file, 0, memory.data(), size).wait().error == 0);
    }
    CHECK(engine->submit(Operation::read, file, 1u << 30, pages.data, 1).wait().error == kEndOfFile);
  });
}
