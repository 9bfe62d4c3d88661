// infinity._aio: the engines for Python. Everything that may block runs without the GIL. A Result is read here alone:
// what failed is an infinity.errors.NvmeError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "aio.h"
#include "crc32c.h"

namespace py = pybind11;

namespace infinity::aio {

namespace {

// Runs `work` without the GIL; a std::system_error becomes an OSError with errno and file name (when `path` is given).
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
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.empty() ? nullptr : path.c_str());
  throw py::error_already_set();
}

// As os.fsdecode() does: a path need not be UTF-8.
py::object decoded(const std::string& path) {
  auto text = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
  if (!text) throw py::error_already_set();
  return text;
}

struct Range {
  std::uint64_t offset = 0, bytes = 0;
};

// The operation of a request, as its error shows it.
struct Asked {
  Operation operation;
  std::string path, what;
  std::vector<Range> parts;    // of the file, one after the other
  std::optional<Range> whole;  // the range that a request of one part is a part of

  // The one reader of a failed completion: an infinity.errors.NvmeError.
  [[noreturn]] void raise(const Result& result) const;
};

void Asked::raise(const Result& result) const {
  Range range;
  std::uint64_t done = result.done;
  for (const Range& part : parts) {
    range = part;
    if (done < part.bytes) break;  // there is one: an error never goes with all bytes done
    done -= part.bytes;
  }
  if (whole) {
    done += range.offset - whole->offset;
    range = *whole;
  }
  const py::object type = py::module_::import("infinity.errors").attr("NvmeError");
  const int code = result.error == kEndOfFile ? 0 : result.error;
  const py::object error =
      type(operation == Operation::read ? "read" : "write", decoded(path), range.offset, code, range.bytes, done, what);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw py::error_already_set();
}

constexpr const char* kForked = "this belongs to a process that was forked; make an engine in the child";

// The object behind a Python File, Engine or CuFile. Calls hold their own reference, so close() cannot pull it away from
// another thread; the GIL guards the pointer. A forked child lacks the engine's threads and may find its mutex locked for ever:
// there it refuses calls, and nothing ends it.
template <class T>
class Closable {
 public:
  explicit Closable(std::shared_ptr<T> object) : object_(std::move(object)), process_(::getpid()) {}
  Closable(const Closable&) = delete;
  Closable& operator=(const Closable&) = delete;
  ~Closable() { close(); }

  std::shared_ptr<T> get() const {
    if (!object_) throw py::value_error("it is closed");
    if (inherited()) throw py::value_error(kForked);
    return object_;
  }
  void close() {
    if (inherited()) return static_cast<void>(new std::shared_ptr<T>(std::move(object_)));
    std::shared_ptr<T> last = std::move(object_);
    py::gil_scoped_release release;
    if constexpr (std::is_same_v<T, Engine>) {
      if (last) last->drain();  // another thread's call may keep the object a moment longer
    }
    last.reset();
  }

 private:
  bool inherited() const { return !std::is_same_v<T, File> && process_ != ::getpid(); }

  std::shared_ptr<T> object_;
  pid_t process_;
};

using PyFile = Closable<File>;
using PyEngine = Closable<Engine>;
using PyCuFile = Closable<CuFile>;

std::unique_ptr<PyFile> open_file(const std::string& path, bool create, unsigned mode, bool direct,
                                  const std::string& name) {
  return std::make_unique<PyFile>(blocking(
      name.empty() ? path : name, [&] { return std::make_shared<File>(path, create, mode, direct, name); }));
}

std::unique_ptr<PyEngine> make_engine(const std::string& kind, unsigned depth, unsigned threads,
                                      std::size_t request_bytes) {
  const Options options{depth, threads, request_bytes};
  if (kind == "io_uring") return std::make_unique<PyEngine>(make_io_uring(options));
  if (kind == "posix") return std::make_unique<PyEngine>(make_posix(options));
  throw py::value_error("kind must be 'io_uring' or 'posix', not '" + kind + "'");
}

std::unique_ptr<PyCuFile> load_cufile(const std::vector<std::string>& libraries) {
  py::gil_scoped_release release;
  return std::make_unique<PyCuFile>(std::make_shared<CuFile>(libraries));
}

std::unique_ptr<PyEngine> cufile_engine(const PyCuFile& self, const PyFile& file, unsigned threads, std::size_t request_bytes) {
  const auto cufile = self.get();
  const auto target = file.get();
  py::gil_scoped_release release;
  return std::make_unique<PyEngine>(make_cufile({Options{}.depth, threads, request_bytes}, cufile, *target));
}

// A ticket and, when the caller wishes, the object that owns the memory: that object lives until the request is
// complete, so the thread that drops such a ticket waits for that. A ticket that was seen to be complete keeps only the outcome.
// The GIL guards the fields.
class PyTicket {
 public:
  PyTicket(Ticket ticket, std::weak_ptr<Engine> engine, Asked asked, py::object owner)
      : ticket_(std::move(ticket)), engine_(std::move(engine)), asked_(std::move(asked)), owner_(std::move(owner)),
        process_(::getpid()) {}
  PyTicket(PyTicket&&) = default;
  // In a forked child nothing completes; the parent's engine is the parent's.
  ~PyTicket() {
    if (owner_ && !owner_.is_none() && process_ == ::getpid()) settle();
  }

  bool done() {
    if (!ticket_.done()) return false;
    take();
    return true;
  }
  std::uint64_t wait() {
    if (process_ != ::getpid() && !ticket_.done()) throw py::value_error(kForked);
    settle();
    take();
    if (outcome_->error != 0) asked_.raise(*outcome_);
    return outcome_->done;
  }
  void promote() {
    if (process_ != ::getpid()) throw py::value_error(kForked);
    if (const auto engine = engine_.lock()) engine->promote(ticket_);
  }

 private:
  void settle() const {
    if (ticket_.done()) return;
    const Ticket ticket = ticket_;  // another thread may be in wait() meanwhile
    py::gil_scoped_release release;
    ticket.wait();
  }
  void take() {
    if (!outcome_) outcome_ = ticket_.wait();
    ticket_ = {};
    const py::object last = std::exchange(owner_, py::none());  // its end may run whatever code, with all of this done
  }

  Ticket ticket_;  // empty once there is an outcome
  std::optional<Result> outcome_;
  std::weak_ptr<Engine> engine_;
  Asked asked_;
  py::object owner_;
  pid_t process_;
};

Priority priority(bool background) { return background ? Priority::background : Priority::foreground; }

template <Operation operation>
PyTicket submit(PyEngine& self, const PyFile& file, std::uint64_t offset, std::uintptr_t address, std::size_t bytes,
                bool background, py::object owner, std::string what,
                const std::optional<std::pair<std::uint64_t, std::uint64_t>>& whole) {
  const auto engine = self.get();
  const auto target = file.get();
  Ticket ticket;
  {
    py::gil_scoped_release release;
    ticket = engine->submit(operation, *target, offset, reinterpret_cast<void*>(address), bytes, priority(background));
  }
  Asked asked{operation, target->path(), std::move(what), {{offset, bytes}}, {}};
  if (whole) asked.whole = Range{whole->first, whole->second};
  return PyTicket(std::move(ticket), engine, std::move(asked), std::move(owner));
}

using Numbers = py::array_t<std::uint64_t, py::array::c_style | py::array::forcecast>;

template <Operation operation>
PyTicket submit_batch(PyEngine& self, const PyFile& file, const Numbers& offsets, const Numbers& addresses,
                      const Numbers& sizes, bool background, py::object owner) {
  const auto engine = self.get();
  const auto target = file.get();
  if (offsets.ndim() != 1 || addresses.ndim() != 1 || sizes.ndim() != 1 || addresses.size() != offsets.size() ||
      sizes.size() != offsets.size())
    throw py::value_error("offsets, addresses and sizes must have one dimension and the same length");
  std::vector<Part> parts(static_cast<std::size_t>(offsets.size()));
  Asked asked{operation, target->path(), {}, std::vector<Range>(parts.size()), {}};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i] = {offsets.data()[i], reinterpret_cast<void*>(addresses.data()[i]), sizes.data()[i]};
    asked.parts[i] = {parts[i].offset, parts[i].bytes};
  }
  Ticket ticket;
  {
    py::gil_scoped_release release;
    ticket = engine->submit(operation, *target, std::move(parts), priority(background));
  }
  return PyTicket(std::move(ticket), engine, std::move(asked), std::move(owner));
}

py::dict counters(const PyEngine& self) {
  const Counters now = self.get()->counters();
  using namespace py::literals;
  return py::dict("bytes_read"_a = now.bytes_read, "bytes_written"_a = now.bytes_written,
                  "device_requests"_a = now.device_requests, "continued"_a = now.continued,
                  "bounced_bytes"_a = now.bounced_bytes, "fixed_requests"_a = now.fixed_requests);
}

}  // namespace

PYBIND11_MODULE(_aio, module) {
  using namespace py::literals;
  module.doc() = "Asynchronous file I/O: one contract, an io_uring and a POSIX engine (see native/aio/aio.h).";
  module.attr("ALIGNMENT") = kAlignment;
  module.attr("crc32c_kind") = crc32c_kind();
  module.def(
      "crc32c",
      [](std::uintptr_t address, std::size_t nbytes, std::uint32_t crc) {
        py::gil_scoped_release release;
        return crc32c(reinterpret_cast<const void*>(address), nbytes, crc);
      },
      "address"_a, "nbytes"_a, "crc"_a = 0, "CRC32C (RFC 3720) of bytes that follow those that gave `crc`.");
  module.def(
      "crc32c_pieces",
      [](std::uintptr_t address, std::size_t nbytes, std::size_t piece, py::array_t<std::uint32_t> sums) {
        if (piece == 0 || sums.ndim() != 1 || static_cast<std::size_t>(sums.size()) != (nbytes + piece - 1) / piece)
          throw py::value_error("sums must have one dimension and an element for each piece");
        std::uint32_t* target = sums.mutable_data();
        py::gil_scoped_release release;
        crc32c_pieces(reinterpret_cast<const void*>(address), nbytes, piece, target);
      },
      "address"_a, "nbytes"_a, "piece"_a, py::arg("sums").noconvert(),
      "Fill `sums` (uint32) with the CRC32C of every `piece` bytes; the last piece may be shorter.");
  module.def(
      "io_uring_available",
      [] {
        std::string reason;
        const bool available = io_uring_available(&reason);
        return py::make_tuple(available, reason);
      },
      "(True, \"\"), or (False, why io_uring cannot be had here).");

  py::class_<PyFile>(module, "File", "An open file. Every failure is an OSError with errno and filename.")
      .def(py::init(&open_file), "path"_a, "create"_a = false, "mode"_a = 0600, "direct"_a = true, "name"_a = "",
           "`name`: what `path` and errors say; for a path that is a descriptor.")
      .def_property_readonly("path", [](const PyFile& self) { return decoded(self.get()->path()); })
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

  py::class_<PyTicket>(module, "Ticket",
                       "One request in flight. The memory must stay valid until it is done; `owner` sees to that.")
      .def("done", &PyTicket::done, "Whether wait() would return, or raise, at once.")
      .def("wait", &PyTicket::wait,
           "Block until complete; the bytes moved, which are all that were asked for. Otherwise NvmeError with path, offset, "
           "errno, asked and done: of the request, of the first part of a batch that failed, or of `whole`. May be called again.")
      .def("promote", &PyTicket::promote,
           "A background request goes on as a foreground one, after those that are queued; does nothing for any other.");

  const Faults none;
  py::class_<PyEngine>(module, "Engine", "Any thread may use it.")
      .def(py::init(&make_engine), "kind"_a, "depth"_a = Options{}.depth, "threads"_a = Options{}.threads,
           "request_bytes"_a = Options{}.request_bytes)
      .def_property_readonly("kind", [](const PyEngine& self) { return self.get()->kind(); })
      .def("read", &submit<Operation::read>, "file"_a, "offset"_a, "address"_a, "nbytes"_a, "background"_a = false,
           "owner"_a = py::none(), "what"_a = "", "whole"_a = py::none(),
           "Read bytes [offset, offset + nbytes) to `address`; blocks only while the queue is full. `background`: after "
           "what is not. `owner`: kept alive until the ticket is done; dropping such a ticket earlier waits for it. An error is "
           "of `what`, and, where this is a part of something, of that `whole`: its (offset, nbytes).")
      .def("write", &submit<Operation::write>, "file"_a, "offset"_a, "address"_a, "nbytes"_a, "background"_a = false,
           "owner"_a = py::none(), "what"_a = "", "whole"_a = py::none(),
           "Write `nbytes` at `address` to the file at `offset`; the rest is as for read().")
      .def("read_batch", &submit_batch<Operation::read>, "file"_a, "offsets"_a, "addresses"_a, "sizes"_a,
           "background"_a = false, "owner"_a = py::none(),
           "Many reads as one request with one ticket. Three sequences of one length, best as NumPy arrays of uint64. "
           "What is left after a failure is not started.")
      .def("write_batch", &submit_batch<Operation::write>, "file"_a, "offsets"_a, "addresses"_a, "sizes"_a,
           "background"_a = false, "owner"_a = py::none(), "Many writes as one request; the rest is as for read_batch().")
      .def("register_memory",
           [](const PyEngine& self, std::uintptr_t address, std::size_t bytes) {
             const auto engine = self.get();
             blocking("", [&] { engine->register_memory(reinterpret_cast<void*>(address), bytes); });
           },
           "address"_a, "nbytes"_a,
           "Pin memory until it is forgotten, so that requests inside it cost less; forget it before it is freed. OSError "
           "when the kernel refuses (memlock limit, before Linux 5.19), ValueError when it overlaps registered memory; then "
           "nothing has changed and everything works as before. The POSIX engine does nothing.")
      .def("forget_memory",
           [](const PyEngine& self, std::uintptr_t address) {
             const auto engine = self.get();
             blocking("", [&] { engine->forget_memory(reinterpret_cast<void*>(address)); });
           },
           "address"_a, "Undo register_memory(address, ...); does nothing when that is not registered.")
      .def("counters", &counters, "Bytes and requests since the engine was made.")
      .def("set_faults",
           [](const PyEngine& self, std::uint64_t seed, double short_fraction, std::size_t short_unit,
              std::int64_t fail_read_at, std::int64_t fail_write_at, int fail_errno, double error_fraction,
              std::vector<int> errnos, double delay_fraction, double delay_seconds, std::int64_t fail_ring_at,
              double bytes_per_second) {
             self.get()->set_faults({seed, short_fraction, short_unit, fail_read_at, fail_write_at, fail_errno,
                                     error_fraction, std::move(errnos), delay_fraction, delay_seconds, fail_ring_at,
                                     bytes_per_second});
           },
           py::kw_only(), "seed"_a = none.seed, "short_fraction"_a = none.short_fraction,
           "short_unit"_a = none.short_unit, "fail_read_at"_a = none.fail_read_at,
           "fail_write_at"_a = none.fail_write_at, "fail_errno"_a = none.fail_errno,
           "error_fraction"_a = none.error_fraction, "errnos"_a = none.errnos,
           "delay_fraction"_a = none.delay_fraction, "delay_seconds"_a = none.delay_seconds,
           "fail_ring_at"_a = none.fail_ring_at, "bytes_per_second"_a = none.bytes_per_second,
           "Make later requests fail, be short or be slow (see Faults in aio.h); without arguments: none.")
      .def("drain",
           [](const PyEngine& self) {
             const auto engine = self.get();
             py::gil_scoped_release release;
             engine->drain();
           },
           "Block until nothing is in flight.")
      .def("close", &PyEngine::close, "Drain and stop.");

  py::class_<PyCuFile>(module, "CuFile",
                       "libcufile with its driver open: how a drive writes into the memory of a GPU. One thread at a time.")
      .def(py::init(&load_cufile), "libraries"_a,
           "The first of these names or paths that can be loaded. RuntimeError says why a drive cannot write to a GPU here; "
           "a library that may copy through host memory is refused.")
      .def("register_memory",
           [](const PyCuFile& self, std::uintptr_t address, std::size_t bytes) {
             const auto cufile = self.get();
             py::gil_scoped_release release;
             cufile->register_memory(reinterpret_cast<void*>(address), bytes);
           },
           "address"_a, "nbytes"_a, "Where reads may go, until the last engine is closed; once. RuntimeError when it is refused.")
      .def("engine", &cufile_engine, "file"_a, "threads"_a = Options{}.threads, "request_bytes"_a = Options{}.request_bytes,
           "An engine that reads `file` into the registered memory, at multiples of 4096. The caller's CUDA context is that of the "
           "memory. RuntimeError when the file cannot be read so.")
      .def("close", &PyCuFile::close, "After its engines: forget the memory and close the driver.");
}

}  // namespace infinity::aio
