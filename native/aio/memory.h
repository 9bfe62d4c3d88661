// Huge pages: memory on them for the engine's own buffers, and whether a caller's memory lies on them.
#pragma once

#include <cstddef>

namespace infinity::aio {

// Anonymous memory, at an address that is a multiple of 2 MiB and on huge pages where the kernel gives them. Nothing is
// touched before it is used.
class HugeBuffer {
 public:
  explicit HugeBuffer(std::size_t bytes);  // throws std::bad_alloc
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  char* data() const { return data_; }

 private:
  void* map_;
  std::size_t mapped_;
  char* data_;
};

// False when a page of [memory, memory + bytes) is known to be a small one, or not there yet. Takes about a microsecond:
// the scan stops at the first such page. True where the kernel cannot tell (before Linux 6.7).
bool on_huge_pages(const void* memory, std::size_t bytes);

// False when a part of [memory, memory + bytes) is not mapped (at most 1 MiB). If the caller freed memory during
// a transfer, it gets EFAULT, as from the kernel, and the copy does not crash. Memory freed after this check is not detected.
bool is_mapped(const void* memory, std::size_t bytes);

}  // namespace infinity::aio
