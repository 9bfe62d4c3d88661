// Executes device requests with pread and pwrite on a few threads: works on every kernel and in every container.
#include <unistd.h>

#include <cerrno>

#include "workers.h"

namespace infinity::aio {

namespace {

class Posix final : public WorkerEngine {
 public:
  explicit Posix(const Options& options) : WorkerEngine(options) { start(); }
  ~Posix() override { join(); }
  const char* kind() const override { return "posix"; }

 private:
  int execute(const Call& call) override {
    const auto offset = static_cast<off_t>(call.offset);
    const ssize_t result = call.operation == Operation::read
                               ? ::pread(call.descriptor, call.memory, call.bytes, offset)
                               : ::pwrite(call.descriptor, call.memory, call.bytes, offset);
    return result < 0 ? -errno : static_cast<int>(result);
  }
};

}  // namespace

std::unique_ptr<Engine> make_posix(const Options& options) { return std::make_unique<Posix>(options); }

}  // namespace infinity::aio
