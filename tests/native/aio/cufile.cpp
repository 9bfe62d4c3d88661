// Does the cuFile engine read exactly what was asked straight into registered memory, name what stops it, and leave nothing behind?
#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "check.h"

using namespace infinity::aio;

namespace {

template <class Error, class Work>
std::string refusal(Work work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

int main(int count, char** words) {
  CHECK(count == 3);
  const std::string library = words[1];
  void* cuda = ::dlopen(words[2], RTLD_NOW);
  CHECK(cuda);
  void* fake = ::dlopen(library.c_str(), RTLD_NOW);
  CHECK(fake);
  const auto knob = [&](const char* name) -> long& { return *static_cast<long*>(::dlsym(fake, name)); };
  const auto code = [&](const char* name) -> int& { return *static_cast<int*>(::dlsym(fake, name)); };

  constexpr std::size_t kPiece = 4 * kAlignment, kPieces = 33, kBytes = kPiece * kPieces;
  Scratch scratch("aio_cufile");
  File file(scratch.path, true, 0600);
  Pages source(kBytes), memory(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) source.data[i] = static_cast<unsigned char>(i * 7 + i / 4096);
  const Options options{64, 6, kPiece};
  CHECK(make_posix(options)->submit(Operation::write, file, 0, source.data, kBytes).wait().error == 0);
  if (!file.direct()) return 77;

  // What there is not, and what it refuses.
  CHECK(has(refusal<std::runtime_error>([&] { CuFile none({"libinfinity-none.so.0"}); }), "not installed"));
  CHECK(has(refusal<std::runtime_error>([&] { CuFile other({"libdl.so.2"}); }), "not the libcufile"));
  code("open_code") = 5001;
  CHECK(has(refusal<std::runtime_error>([&] { CuFile none({library}); }), "nvidia-fs is not loaded"));
  code("open_code") = 0;
  for (const char* copies : {"must_copy", "posix_mode", "falls_back", "stubborn"}) {
    code(copies) = 1;
    CHECK(has(refusal<std::runtime_error>([&] { CuFile none({library}); }), "copy through host memory"));
    code(copies) = 0;
    CHECK(knob("drivers") == 0);
  }
  code("settings") = 12;  // an older version, which refuses the numbers of later settings
  { CuFile old({library}); }
  code("settings") = 14;
  {
    const auto cufile = std::make_shared<CuFile>(std::vector<std::string>{"libinfinity-none.so.0", library});
    const CuFile second({library});
    CHECK(knob("drivers") == 1);
    code("memory_code") = 5016;
    CHECK(has(refusal<std::runtime_error>([&] { cufile->register_memory(memory.data, kBytes); }), "cannot be pinned"));
    code("memory_code") = 0;
    knob("limit_kib") = kBytes / 1024 - 4;
    code("fixed_limit") = 1;
    CHECK(has(refusal<std::runtime_error>([&] { cufile->register_memory(memory.data, kBytes); }), "cannot be pinned"));
    code("fixed_limit") = 0;
    cufile->register_memory(memory.data, kBytes);
    CHECK(knob("limit_kib") == (32l << 20) + static_cast<long>(kBytes / 1024));
    code("file_code") = 5008;
    CHECK(has(refusal<std::runtime_error>([&] { make_cufile(options, cufile, file); }), "file system is not supported"));
    code("file_code") = 0;
    CHECK(knob("files") == 0 && knob("memories") == 1);

    const auto engine = make_cufile(options, cufile, file);
    const auto read = [&](std::size_t at, std::size_t bytes) {
      return engine->submit(Operation::read, file, at, memory.data + at, bytes).wait();
    };
    const auto whole = [&] {
      std::fill_n(memory.data, kBytes, 0xAA);
      const Result result = read(0, kBytes);
      return result.error == 0 && result.done == kBytes && std::memcmp(memory.data, source.data, kBytes) == 0;
    };
    CHECK(whole());
    CHECK(knob("bytes_read") == static_cast<long>(kBytes));
    CHECK(engine->counters().bounced_bytes == 0);

    // Short reads and EINTR are the ordinary path.
    knob("short_every") = 3;
    CHECK(whole());
    knob("short_every") = 0;
    CHECK(engine->counters().continued > 0);
    knob("fail_read_at") = knob("reads") + 2;
    code("fail_errno") = EINTR;
    knob("fail_reads") = 9;
    CHECK(whole());

    // What fails gives its errno, or cuFile's code, and the bytes before it.
    knob("fail_reads") = 1;
    for (const int error : {EIO, 5036}) {
      code("fail_errno") = EIO;
      knob("fail_result") = error == EIO ? -1 : -error;
      for (std::size_t n = 0; n < kPieces; n += 8) {
        knob("fail_read_at") = knob("reads") + static_cast<long>(n);
        const Result result = read(0, kBytes);
        CHECK(result.error == error && result.asked == kBytes && result.done % kPiece == 0 && result.done < kBytes);
        CHECK(std::memcmp(memory.data, source.data, result.done) == 0);
        CHECK(whole());
      }
    }
    // Nothing but aligned reads of this file into that memory.
    using Refused = std::invalid_argument;
    CHECK(has(refusal<Refused>([&] { read(1, kAlignment); }), "multiples of 4096"));
    CHECK(has(refusal<Refused>([&] { read(0, kAlignment - 1); }), "multiples of 4096"));
    CHECK(has(refusal<Refused>([&] { read(kBytes, kAlignment); }), "not registered"));
    CHECK(has(refusal<Refused>([&] { engine->submit(Operation::write, file, 0, memory.data, kAlignment); }), "only reads"));
    File other(scratch.path, false, 0600);
    CHECK(has(refusal<Refused>([&] { engine->submit(Operation::read, other, 0, memory.data, kAlignment); }), "made for"));
    // The end of the file.
    file.truncate(kPiece + 10);
    const Result result = read(0, kBytes);
    CHECK(result.error == kEndOfFile && result.done == kPiece + 10);
  }
  // Each of its threads had the context, and then ignored captures.
  CHECK(*static_cast<int*>(::dlsym(cuda, "taken")) == static_cast<int>(options.threads));
  CHECK(*static_cast<int*>(::dlsym(cuda, "ignoring")) == static_cast<int>(options.threads));
  CHECK(knob("drivers") == 0 && knob("files") == 0 && knob("memories") == 0 && knob("opened") == 6);
  return 0;
}
