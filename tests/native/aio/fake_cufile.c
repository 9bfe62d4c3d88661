// A libcufile for tests: the memory of the "GPU" is the host's, a read is a pread, and the knobs below make it fail or fall short.
// Whoever loaded it sets them, and reads the counts.
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct {
  int code, cuda;
} Status;

// Knobs.
int open_code = 0;         // what opening the driver returns
int file_code = 0;         // registering a file
int memory_code = 0;       // registering memory
long limit_kib = 33554432; // of the memory that is registered
int fixed_limit = 0;       // which nobody may change
int must_copy = 0;         // the user's setting "force_compat_mode"
int posix_mode = 0;        // "vanilla_posix_io_mode"
int falls_back = 0;        // "gds_fallback_io"
int settings = 14;         // how many it knows; 12 before version 1.20
int stubborn = 0;          // it may copy whatever one asks for
long fail_read_at = -1;    // this read, counted from 0, ...
long fail_result = -1;     // ... returns that,
int fail_errno = EIO;      // and this errno
long fail_reads = 1;       // and so do the next ones, so many in all
long short_every = 0;      // each so many-th read moves a part only
long wrong_every = 0;      // each so many-th read says that it has read, and has not
// Counts.
long reads = 0, bytes_read = 0, drivers = 0, files = 0, memories = 0, opened = 0;

static bool may_copy = true;
static char* region;
static size_t region_bytes;

static Status status(int code) { return (Status){code, code == 5011 ? 999 : 0}; }

Status cuFileDriverOpen(void) {
  if (open_code) return status(open_code);
  ++drivers;
  ++opened;
  return status(0);
}

Status cuFileDriverClose_v2(void) {
  --drivers;
  return status(0);
}

Status cuFileDriverGetProperties(void* properties) {
  memset(properties, 0, 64);
  return status(0);
}

Status cuFileGetParameterBool(int which, bool* value) {
  if (which >= settings) return status(5022);
  const bool values[] = {false, may_copy, must_copy, [12] = posix_mode, [13] = falls_back};
  *value = values[which];
  return status(0);
}

Status cuFileSetParameterBool(int which, bool value) {
  if (drivers) return status(5026);
  if (which == 1 && !stubborn) may_copy = value;
  return status(0);
}

Status cuFileHandleRegister(void** handle, const void* description) {
  struct {
    int type, unused, number;
  } file;
  memcpy(&file, description, sizeof file);
  if (file_code) return status(file_code);
  if (!drivers) return status(5001);
  if (file.type != 1) return status(5018);
  __atomic_add_fetch(&files, 1, __ATOMIC_RELAXED);
  *handle = (char*)0 + file.number + 1;
  return status(0);
}

void cuFileHandleDeregister(void* handle) {
  (void)handle;
  __atomic_sub_fetch(&files, 1, __ATOMIC_RELAXED);
}

Status cuFileBufRegister(const void* memory, size_t bytes, int flags) {
  if (memory_code) return status(memory_code);
  if (bytes > (size_t)limit_kib << 10) return status(5016);
  if (!drivers || flags) return status(5022);
  ++memories;
  region = (char*)memory;
  region_bytes = bytes;
  return status(0);
}

Status cuFileDriverSetMaxPinnedMemSize(size_t kib) {
  if (fixed_limit || kib % 4) return status(5004);
  limit_kib = (long)kib;
  return status(0);
}

Status cuFileBufDeregister(const void* memory) {
  if (memory != region) return status(5024);
  --memories;
  return status(0);
}

ssize_t cuFileRead(void* handle, void* base, size_t bytes, off_t offset, off_t at) {
  const long number = __atomic_fetch_add(&reads, 1, __ATOMIC_RELAXED);
  if (base != region || (size_t)at + bytes > region_bytes) return -5014;
  if (fail_read_at >= 0 && number >= fail_read_at && number < fail_read_at + fail_reads) {
    errno = fail_errno;
    return fail_result;
  }
  if (wrong_every && number % wrong_every == wrong_every - 1) return (ssize_t)bytes;
  if (short_every && number % short_every == short_every - 1 && bytes > 4096) bytes = bytes / 2 / 4096 * 4096 + (bytes < 8192 ? 4096 : 0);
  const ssize_t moved = pread((int)((char*)handle - (char*)0) - 1, (char*)base + at, bytes, offset);
  if (moved > 0) __atomic_add_fetch(&bytes_read, moved, __ATOMIC_RELAXED);
  return moved;
}
