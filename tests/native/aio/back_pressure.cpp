// Do hundreds of requests from many threads all finish, each with its own bytes, when the queue holds one?
#include <algorithm>
#include <thread>

#include "check.h"

using namespace infinity::aio;

namespace {

constexpr std::size_t kThreads = 8, kRequests = 48;
// Unaligned, so that every request also needs the bounce buffers, and several device requests each.
constexpr std::size_t kBytes = 5 * kAlignment + 100, kStride = 8 * kAlignment;

void work(Engine& engine, File& file, std::size_t thread) {
  Bytes memory(kRequests * kBytes);
  std::vector<Ticket> tickets;
  const auto submit = [&](Operation operation) {
    tickets.clear();
    for (std::size_t i = 0; i < kRequests; ++i) {
      const std::size_t offset = (i * kThreads + thread) * kStride + 1;
      tickets.push_back(engine.submit(operation, file, offset, &memory[i * kBytes], kBytes));
    }
    for (const Ticket& ticket : tickets) CHECK(ticket.wait().error == 0);
  };
  const auto expected = [&](std::size_t i) { return static_cast<unsigned char>(i * kThreads + thread); };
  for (std::size_t i = 0; i < kRequests; ++i) std::fill_n(&memory[i * kBytes], kBytes, expected(i));
  submit(Operation::write);
  std::fill(memory.begin(), memory.end(), 0);
  submit(Operation::read);
  for (std::size_t i = 0; i < memory.size(); ++i) CHECK(memory[i] == expected(i / kBytes));
}

}  // namespace

int main(int count, char** words) {
  return ask(count, words, [](const Make& make, const std::string& name) {
    for (unsigned depth : {1u, 2u, 32u}) {
      Scratch scratch(name);
      File file(scratch.path, true, 0600);
      const auto engine = make(Options{depth, 4, 2 * kAlignment});
      std::vector<std::thread> threads;
      for (std::size_t i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { work(*engine, file, i); });
      for (std::thread& thread : threads) thread.join();
      const Counters counters = engine->counters();
      CHECK(counters.bytes_written == kThreads * kRequests * kBytes);
      CHECK(counters.bytes_read == counters.bytes_written);
    }
  });
}
