// What the native test programs share.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "aio.h"

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);     \
      std::exit(1);                                                                     \
    }                                                                                   \
  } while (0)

namespace infinity::aio {

using Bytes = std::vector<unsigned char>;

// A file of this process in the working directory, removed at the end.
class Scratch {
 public:
  explicit Scratch(const std::string& name)
      : path(name + "." + std::to_string(::getpid()) + ".scratch") {
    std::remove(path.c_str());
  }
  ~Scratch() { std::remove(path.c_str()); }
  const std::string path;
};

// Page-aligned memory, so that requests can go straight to the device.
class Pages {
 public:
  explicit Pages(std::size_t bytes) : data(static_cast<unsigned char*>(std::aligned_alloc(kAlignment, bytes))) {}
  ~Pages() { std::free(data); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  unsigned char* const data;
};

using Make = std::function<std::unique_ptr<Engine>(const Options&)>;

// Runs the question for the engine named on the command line.
inline int ask(int count, char** words, void (*question)(const Make& make, const std::string& name)) {
  const std::string kind = count > 1 ? words[1] : "posix";
  std::string reason;
  if (kind == "io_uring" && !io_uring_available(&reason)) {
    std::printf("skipped: %s\n", reason.c_str());
    return 77;
  }
  question(kind == "io_uring" ? make_io_uring : make_posix, std::string(words[0]) + "_" + kind);
  return 0;
}

}  // namespace infinity::aio
