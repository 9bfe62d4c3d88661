#include "memory.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <new>

namespace infinity::aio {

namespace {

constexpr std::size_t kHugePage = 2u << 20, kPage = 4096;

// PAGEMAP_SCAN of linux/fs.h, which older headers lack.
struct PageRegion {
  std::uint64_t start, end, categories;
};
struct ScanArguments {
  std::uint64_t size, flags, start, end, walk_end, vector, vector_length, max_pages;
  std::uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
constexpr std::uint64_t kPageIsHuge = 1u << 6;

// Opened by each engine thread, so always by the process whose memory it asks about.
struct PageMap {
  PageMap() : number(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}
  ~PageMap() {
    if (number >= 0) ::close(number);
  }
  PageMap(const PageMap&) = delete;
  PageMap& operator=(const PageMap&) = delete;
  const int number;
};

}  // namespace

HugeBuffer::HugeBuffer(std::size_t bytes) : mapped_(bytes + kHugePage) {
  map_ = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map_ == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(map_) + (kHugePage - reinterpret_cast<std::uintptr_t>(map_) % kHugePage) % kHugePage;
#ifdef MADV_HUGEPAGE
  ::madvise(data_, bytes, MADV_HUGEPAGE);  // refused where there are none; small pages work too
#endif
}

HugeBuffer::~HugeBuffer() { ::munmap(map_, mapped_); }

bool on_huge_pages(const void* memory, std::size_t bytes) {
  // One descriptor per engine thread, closed with it.
  thread_local const PageMap map;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  PageRegion small{};
  ScanArguments scan{};
  scan.size = sizeof scan;
  scan.start = begin / kPage * kPage;
  scan.end = (begin + bytes + kPage - 1) / kPage * kPage;
  scan.vector = reinterpret_cast<std::uintptr_t>(&small);
  scan.vector_length = scan.max_pages = 1;
  scan.category_inverted = scan.category_mask = scan.return_mask = kPageIsHuge;
  return ::ioctl(map.number, _IOWR('f', 16, ScanArguments), &scan) <= 0;
}

bool is_mapped(const void* memory, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory), first = begin / kPage * kPage;
  unsigned char resident[(1u << 20) / kPage + 1];
  return ::mincore(reinterpret_cast<void*>(first), begin + bytes - first, resident) == 0 || errno != ENOMEM;
}

}  // namespace infinity::aio
