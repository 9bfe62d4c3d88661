// When the ring fails at any moment, does every ticket end, with its bytes or with the ring's errno, and the engine too?
#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>

#include "check.h"

using namespace infinity::aio;

int main(int count, char** words) {
  if (count > 1 && std::string(words[1]) != "io_uring") return 77;  // the other has no ring
  return ask(count, words, [](const Make& make, const std::string& name) {
    constexpr std::size_t kBytes = 6 * kAlignment, kRequests = 40;
    Scratch scratch(name);
    File file(scratch.path, true, 0600);
    Bytes model(kRequests * kBytes);
    for (std::size_t i = 0; i < model.size(); ++i) model[i] = static_cast<unsigned char>(i * 31 + i / 4096);
    CHECK(make({})->submit(Operation::write, file, 0, model.data(), model.size()).wait().error == 0);

    // EBUSY is how a full completion queue shows: completions are taken, and it goes on.
    for (const int code : {EBUSY, EINTR, EAGAIN, ETIME}) {
      for (std::int64_t at = 0; at < 20; ++at) {
        const auto engine = make(Options{4, 1, 2 * kAlignment});
        Faults faults;
        faults.fail_ring_at = at;
        faults.fail_errno = code;
        engine->set_faults(faults);
        Bytes back(model.size());
        CHECK(engine->submit(Operation::read, file, 0, back.data(), back.size()).wait().error == 0);
        CHECK(back == model);
      }
    }

    for (const int code : {EBADF, ENXIO, EFAULT, EINVAL, EBADR, ENOMEM}) {
      for (std::int64_t at = 0; at < 12; ++at) {
        const auto engine = make(Options{4, 1, 2 * kAlignment});
        Faults faults;
        faults.fail_ring_at = at;
        faults.fail_errno = code;
        engine->set_faults(faults);
        Pages pages(model.size());
        std::vector<std::thread> threads;
        for (std::size_t thread = 0; thread < 4; ++thread)
          threads.emplace_back([&, thread] {
            std::vector<std::pair<std::size_t, Ticket>> tickets;
            for (std::size_t i = thread; i < kRequests; i += 4)
              tickets.emplace_back(i, engine->submit(Operation::read, file, i * kBytes, pages.data + i * kBytes, kBytes,
                                                     i % 8 < 4 ? Priority::foreground : Priority::background));
            for (const auto& [i, ticket] : tickets) {
              const Result result = ticket.wait();
              CHECK(result.asked == kBytes && (result.error == 0 || result.error == code));
              CHECK((result.error == 0) == (result.done == kBytes));
              CHECK(std::equal(pages.data + i * kBytes, pages.data + i * kBytes + result.done, model.data() + i * kBytes));
            }
          });
        for (std::thread& thread : threads) thread.join();
        const Ticket last = engine->submit(Operation::read, file, 0, pages.data, kBytes);
        CHECK(last.wait().error == 0 || (last.wait().error == code && last.done() && last.wait().done == 0));
        if (last.wait().error) {
          try {
            engine->register_memory(pages.data, kBytes);
            CHECK(!"an exception");
          } catch (const std::system_error& error) {
            CHECK(error.code().value() == code);
          }
        }
        engine->drain();
      }
    }
  });
}
