#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "engine.h"

namespace infinity::aio {

namespace {

void check(int result, const std::string& path) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), path);
}

// A virtio disk or a partition of one.
bool on_virtual_disk(int number) {
  struct stat status;
  if (::fstat(number, &status) != 0) return false;
  const std::string device = std::to_string(major(status.st_dev)) + ":" + std::to_string(minor(status.st_dev));
  char* real = ::realpath(("/sys/dev/block/" + device).c_str(), nullptr);
  const bool found = real && std::strstr(real, "/virtio");
  std::free(real);
  return found;
}

}  // namespace

Descriptor::~Descriptor() { ::close(number); }

bool Descriptor::ends_at(std::uint64_t position) const {
  struct stat status;
  return ::fstat(number, &status) != 0 || !S_ISREG(status.st_mode) ||
         position >= static_cast<std::uint64_t>(status.st_size);
}

File::File(const std::string& path, bool create, unsigned mode, bool want_direct) : path_(path) {
  const int flags = O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0);
  int number = want_direct ? ::open(path.c_str(), flags | O_DIRECT, mode) : -1;
  direct_ = number >= 0;
  // EINVAL is how a file system without O_DIRECT (older tmpfs, some FUSE) says so.
  if (!direct_ && (!want_direct || errno == EINVAL)) number = ::open(path.c_str(), flags, mode);
  check(number, path);
  descriptor_ = std::make_shared<const Descriptor>(number, direct_ && on_virtual_disk(number));
}

void File::allocate(std::uint64_t bytes) {
  if (bytes == 0) return;
  int result;
  do {
    // Not posix_fallocate: where the file system cannot reserve, it writes single bytes, which O_DIRECT refuses.
    result = ::fallocate(descriptor_->number, 0, 0, static_cast<off_t>(bytes));
  } while (result < 0 && errno == EINTR);
  check(result, path_);
}

std::uint64_t File::size() const {
  struct stat status;
  check(::fstat(descriptor_->number, &status), path_);
  return static_cast<std::uint64_t>(status.st_size);
}

void File::truncate(std::uint64_t bytes) {
  check(::ftruncate(descriptor_->number, static_cast<off_t>(bytes)), path_);
}

void File::sync() { check(::fdatasync(descriptor_->number), path_); }

}  // namespace infinity::aio
