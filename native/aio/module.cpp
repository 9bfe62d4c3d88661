// infinity._aio: the engines for Python. Everything that may block runs without the GIL.
#include <pybind11/pybind11.h>

#include <cerrno>
#include <memory>
#include <string>
#include <system_error>
#include <type_traits>

#include "aio.h"

namespace py = pybind11;

namespace infinity::aio {

namespace {

// Runs `work` without the GIL; a std::system_error becomes an OSError with errno and file name.
template <class Work>
auto blocking(const std::string& path, Work work) {
  int code;
  try {
    py::gil_scoped_release release;
    return work();
  } catch (const std::system_error& error) {
    code = error.code().value();
  }
  errno = code;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
  throw py::error_already_set();
}

// The object behind a Python File or Engine. Calls hold their own reference, so close() cannot pull it away from
// another thread; the GIL guards the pointer.
template <class T>
class Closable {
 public:
  explicit Closable(std::shared_ptr<T> object) : object_(std::move(object)) {}
  Closable(const Closable&) = delete;
  Closable& operator=(const Closable&) = delete;
  ~Closable() { close(); }

  std::shared_ptr<T> get() const {
    if (!object_) throw py::value_error("it is closed");
    return object_;
  }
  void close() {
    std::shared_ptr<T> last = std::move(object_);
    py::gil_scoped_release release;
    if constexpr (std::is_same_v<T, Engine>) {
      if (last) last->drain();  // another thread's call may keep the object a moment longer
    }
    last.reset();
  }

 private:
  std::shared_ptr<T> object_;
};

using PyFile = Closable<File>;
using PyEngine = Closable<Engine>;

std::unique_ptr<PyFile> open_file(const std::string& path, bool create, unsigned mode, bool direct) {
  return std::make_unique<PyFile>(
      blocking(path, [&] { return std::make_shared<File>(path, create, mode, direct); }));
}

std::unique_ptr<PyEngine> make_engine(const std::string& kind, unsigned depth, unsigned threads,
                                      std::size_t request_bytes) {
  const Options options{depth, threads, request_bytes};
  if (kind == "io_uring") return std::make_unique<PyEngine>(make_io_uring(options));
  if (kind == "posix") return std::make_unique<PyEngine>(make_posix(options));
  throw py::value_error("kind must be 'io_uring' or 'posix', not '" + kind + "'");
}

template <Operation operation>
Ticket submit(PyEngine& self, const PyFile& file, std::uint64_t offset, std::uintptr_t address, std::size_t bytes) {
  const auto engine = self.get();
  const auto target = file.get();
  py::gil_scoped_release release;
  return engine->submit(operation, *target, offset, reinterpret_cast<void*>(address), bytes);
}

py::dict counters(const PyEngine& self) {
  const Counters now = self.get()->counters();
  using namespace py::literals;
  return py::dict("bytes_read"_a = now.bytes_read, "bytes_written"_a = now.bytes_written,
                  "device_requests"_a = now.device_requests, "continued"_a = now.continued,
                  "bounced_bytes"_a = now.bounced_bytes);
}

py::tuple wait(const Ticket& self) {
  if (!self.done()) {
    py::gil_scoped_release release;
    self.wait();
  }
  const Result result = self.wait();
  return py::make_tuple(result.error, result.asked, result.done);
}

}  // namespace

PYBIND11_MODULE(_aio, module) {
  using namespace py::literals;
  module.doc() = "Asynchronous file I/O: one contract, an io_uring and a POSIX engine (see native/aio/aio.h).";
  module.attr("ALIGNMENT") = kAlignment;
  module.attr("END_OF_FILE") = kEndOfFile;
  module.def(
      "io_uring_available",
      [] {
        std::string reason;
        const bool available = io_uring_available(&reason);
        return py::make_tuple(available, reason);
      },
      "(True, \"\"), or (False, why io_uring cannot be had here).");

  py::class_<PyFile>(module, "File", "An open file. Every failure is an OSError with errno and filename.")
      .def(py::init(&open_file), "path"_a, "create"_a = false, "mode"_a = 0600, "direct"_a = true)
      .def_property_readonly("path", [](const PyFile& self) { return self.get()->path(); })
      .def_property_readonly("direct", [](const PyFile& self) { return self.get()->direct(); },
                             "Whether O_DIRECT is in force.")
      .def("size", [](const PyFile& self) { const auto file = self.get(); return file->size(); }, "Bytes.")
      .def("allocate",
           [](const PyFile& self, std::uint64_t bytes) {
             const auto file = self.get();
             blocking(file->path(), [&] { file->allocate(bytes); });
           },
           "bytes"_a, "Reserve blocks for the first `bytes` bytes; the size grows to at least that.")
      .def("truncate",
           [](const PyFile& self, std::uint64_t bytes) {
             const auto file = self.get();
             blocking(file->path(), [&] { file->truncate(bytes); });
           },
           "bytes"_a)
      .def("sync",
           [](const PyFile& self) {
             const auto file = self.get();
             blocking(file->path(), [&] { file->sync(); });
           },
           "Return when data and size are on the device.")
      .def("close", &PyFile::close, "Requests in flight keep the descriptor open until they complete.");

  py::class_<Ticket>(module, "Ticket", "One request in flight. The memory must stay valid until it is done.")
      .def("done", &Ticket::done)
      .def("wait", &wait,
           "Block until complete; (error, asked, done): 0, an errno or END_OF_FILE; then bytes. error is 0 if and only "
           "if done == asked.");

  const Faults none;
  py::class_<PyEngine>(module, "Engine", "Any thread may use it.")
      .def(py::init(&make_engine), "kind"_a, "depth"_a = 64, "threads"_a = 4, "request_bytes"_a = 1u << 20)
      .def_property_readonly("kind", [](const PyEngine& self) { return self.get()->kind(); })
      .def("read", &submit<Operation::read>, "file"_a, "offset"_a, "address"_a, "nbytes"_a,
           "Read bytes [offset, offset + nbytes) to `address`; blocks only while the queue is full.")
      .def("write", &submit<Operation::write>, "file"_a, "offset"_a, "address"_a, "nbytes"_a,
           "Write `nbytes` at `address` to the file at `offset`; blocks only while the queue is full.")
      .def("counters", &counters, "Bytes and requests since the engine was made.")
      .def("set_faults",
           [](const PyEngine& self, std::uint64_t seed, double short_fraction, std::int64_t fail_read_at,
              std::int64_t fail_write_at, int fail_errno, double bytes_per_second) {
             self.get()->set_faults(
                 {seed, short_fraction, fail_read_at, fail_write_at, fail_errno, bytes_per_second});
           },
           py::kw_only(), "seed"_a = none.seed, "short_fraction"_a = none.short_fraction,
           "fail_read_at"_a = none.fail_read_at, "fail_write_at"_a = none.fail_write_at,
           "fail_errno"_a = none.fail_errno, "bytes_per_second"_a = none.bytes_per_second,
           "Make later requests fail, be short or be slow (see Faults in aio.h); without arguments: none.")
      .def("drain",
           [](const PyEngine& self) {
             const auto engine = self.get();
             py::gil_scoped_release release;
             engine->drain();
           },
           "Block until nothing is in flight.")
      .def("close", &PyEngine::close, "Drain and stop.");
}

}  // namespace infinity::aio
