// Do 64 threads that submit at once, with faults, lose no ticket, meet no deadlock and leave memory bounded?
// aio_many_threads KIND [SECONDS]
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>

#include "check.h"

using namespace infinity::aio;

namespace {

constexpr std::size_t kThreads = 64, kRegion = 64 * kAlignment;
double seconds = 1;

std::size_t resident() {  // bytes
  std::ifstream file("/proc/self/statm");
  std::size_t pages = 0;
  file >> pages >> pages;
  return pages * 4096;
}

// Keeps a region of the file and a model of it, moves random parts in single requests and batches, and compares.
struct Worker {
  Worker(Engine& engine, File& file, std::size_t number)
      : engine(engine), file(file), base(number * kRegion), random(static_cast<unsigned>(number)), model(kRegion, 0),
        pages(kRegion + kAlignment) {}

  void turn() {
    const auto below = [&](std::size_t bound) { return random() % bound; };
    const Operation operation = below(2) ? Operation::read : Operation::write;
    const Priority priority = below(3) ? Priority::foreground : Priority::background;
    const std::size_t parts = below(4) ? 1 : 2 + below(6), room = kRegion / parts;
    unsigned char* memory = pages.data + (below(2) ? 0 : below(kAlignment));
    std::vector<Part> list;
    for (std::size_t i = 0; i < parts; ++i) {
      std::size_t bytes = below(room), start = i * room + below(room - bytes);
      if (below(2)) {
        start = start / kAlignment * kAlignment;
        if (start < i * room) continue;
      }
      // Two writes must not share a block, so a part ends a block before the next begins.
      if (operation == Operation::write) {
        const std::size_t next = (i + 1) * room / kAlignment * kAlignment;
        start = (start + kAlignment - 1) / kAlignment * kAlignment;
        if (start >= next) continue;
        bytes = std::min(bytes, next - start);
      }
      if (operation == Operation::write)
        for (std::size_t at = 0; at < bytes; ++at) model[start + at] = memory[start + at] = static_cast<unsigned char>(random());
      list.push_back({base + start, memory + start, bytes});
    }
    std::uint64_t asked = 0;
    for (const Part& part : list) asked += part.bytes;
    const Ticket ticket = list.size() == 1
                              ? engine.submit(operation, file, list[0].offset, list[0].memory, list[0].bytes, priority)
                              : engine.submit(operation, file, list, priority);
    if (below(2)) engine.promote(ticket);
    const Result result = ticket.wait();
    CHECK(result.error == 0 && result.asked == asked && result.done == asked);
    for (const Part& part : list)
      CHECK(std::memcmp(part.memory, model.data() + (part.offset - base), part.bytes) == 0);
    ++turns;
    moved += asked;
  }

  Engine& engine;
  File& file;
  const std::size_t base;
  std::mt19937 random;
  Bytes model;
  Pages pages;
  std::uint64_t turns = 0, moved = 0;
};

}  // namespace

int main(int count, char** words) {
  if (count > 2) seconds = std::atof(words[2]);
  return ask(count, words, [](const Make& make, const std::string& name) {
    Scratch scratch(name);
    File file(scratch.path, true, 0600);
    file.truncate(kThreads * kRegion);
    const auto engine = make(Options{16, 4, 16 * kAlignment});
    Faults faults;
    faults.short_fraction = 0.05;
    faults.short_unit = 1;
    faults.error_fraction = 0.05;
    faults.errnos = {EINTR, EAGAIN};
    faults.delay_fraction = 0.02;
    faults.delay_seconds = 0.002;
    engine->set_faults(faults);

    std::vector<std::unique_ptr<Worker>> workers;
    for (std::size_t i = 0; i < kThreads; ++i) workers.push_back(std::make_unique<Worker>(*engine, file, i));
    std::size_t before = 0;
    for (const double part : {0.2, 0.8}) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds * part);
      std::vector<std::thread> threads;
      for (auto& worker : workers)
        threads.emplace_back([&worker, end] {
          do worker->turn();
          while (std::chrono::steady_clock::now() < end);
        });
      for (std::thread& thread : threads) thread.join();
      if (before == 0) before = resident();
    }
    const std::size_t after = resident();
    std::uint64_t turns = 0, moved = 0;
    for (auto& worker : workers) turns += worker->turns, moved += worker->moved;
    const Counters counters = engine->counters();
    CHECK(counters.bytes_read + counters.bytes_written == moved);
    std::printf("%llu requests, %.1f MiB resident before, %.1f after\n", static_cast<unsigned long long>(turns),
                static_cast<double>(before) / (1 << 20), static_cast<double>(after) / (1 << 20));
    CHECK(after < before + (64u << 20));
  });
}
