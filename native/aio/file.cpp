#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>

#include "engine.h"

namespace infinity::aio {

namespace {

void check(int result, const std::string& path) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), path);
}

// A virtio disk or a partition of one. Asked once per device, for the answer takes longer than opening a file.
bool is_virtual_disk(dev_t device) {
  static std::mutex mutex;
  static std::map<dev_t, bool> known;
  std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, added] = known.try_emplace(device, false);
  if (!added) return entry->second;
  const std::string name = std::to_string(major(device)) + ":" + std::to_string(minor(device));
  char* real = ::realpath(("/sys/dev/block/" + name).c_str(), nullptr);
  entry->second = real && std::strstr(real, "/virtio");
  std::free(real);
  return entry->second;
}

bool on_virtual_disk(int number) {
  struct stat status;
  return ::fstat(number, &status) == 0 && is_virtual_disk(status.st_dev);
}

}  // namespace

Descriptor::~Descriptor() { ::close(number); }

bool Descriptor::ends_at(std::uint64_t position) const {
  struct stat status;
  return ::fstat(number, &status) != 0 || !S_ISREG(status.st_mode) ||
         position >= static_cast<std::uint64_t>(status.st_size);
}

File::File(const std::string& path, bool create, unsigned mode, bool want_direct, const std::string& name)
    : path_(name.empty() ? path : name) {
  const auto open_for = [&](int access) {
    const int flags = access | O_CLOEXEC | (create ? O_CREAT : 0);
    int number = want_direct ? ::open(path.c_str(), flags | O_DIRECT, mode) : -1;
    direct_ = number >= 0;
    // EINVAL is how a file system without O_DIRECT (older tmpfs, some FUSE) says so.
    if (!direct_ && (!want_direct || errno == EINVAL)) number = ::open(path.c_str(), flags, mode);
    return number;
  };
  int number = open_for(O_RDWR);
  if (number < 0 && !create && (errno == EACCES || errno == EPERM || errno == EROFS || errno == ETXTBSY))
    number = open_for(O_RDONLY);
  check(number, path_);
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
