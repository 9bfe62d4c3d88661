// Reads into the memory of a GPU through libcufile (GPUDirect Storage), which is loaded when asked for and never linked.
//
// The declarations below are the few that are used of its C interface, as of CUDA 11.4 to 13.
#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <map>
#include <stdexcept>

#include "workers.h"

namespace infinity::aio {

namespace {

struct Status {
  int code;  // 0, or 5000 and more
  int cuda;  // when `code` is kCudaError
};
struct FileDescription {
  int type;
  union {
    int number;
    void* other;
  } handle;
  const void* file_system;
};
struct Properties {
  unsigned major, minor;
  std::size_t poll_threshold, largest_request;
  unsigned supports, controls;
  unsigned rest[16];  // six in CUDA 13
};
using Handle = void*;

constexpr int kFileNumber = 1;                                       // FileDescription::type
constexpr int kNotLoaded = 5001, kCudaError = 5011, kAlreadyOpen = 5026;  // Status::code
constexpr int kMayCopy = 1;                                          // a setting: "allow" of its compatibility mode
constexpr unsigned kMayCopyBit = 1u << 1;                            // of Properties::controls
constexpr std::size_t kLimit = std::size_t{32} << 30;                // of registered memory, by default

std::string describe(const Status& status) {
  const auto code = " (cuFile error " + std::to_string(status.code) + ")";
  switch (status.code) {
    case kNotLoaded: return "the kernel module nvidia-fs is not loaded" + code;
    case 5004: case 5005: return "nvidia-fs and libcufile do not fit together" + code;
    case 5007: return "this platform is not supported" + code;
    case 5008: return "the drive or its file system is not supported" + code;
    case 5009: return "the GPU is not supported" + code;
    case kCudaError: return "CUDA error " + std::to_string(status.cuda) + code;
    case 5016: case 5036: return "the memory cannot be pinned" + code;
    case 5025: return "access is denied" + code;
    default: return "cuFile error " + std::to_string(status.code);
  }
}

void check(const Status& status, const std::string& what) {
  if (status.code != 0) throw std::runtime_error(what + ": " + describe(status));
}

}  // namespace

// The functions of the library, each null where this version of it has none.
struct CuFile::Functions {
  explicit Functions(void* library) : library(library) {
    find(open, "cuFileDriverOpen");
    find(close, "cuFileDriverClose_v2");
    if (!close) find(close, "cuFileDriverClose");
    find(properties, "cuFileDriverGetProperties");
    find(add_file, "cuFileHandleRegister");
    find(remove_file, "cuFileHandleDeregister");
    find(add_memory, "cuFileBufRegister");
    find(remove_memory, "cuFileBufDeregister");
    find(limit_memory, "cuFileDriverSetMaxPinnedMemSize");
    find(read, "cuFileRead");
    find(get, "cuFileGetParameterBool");
    find(set, "cuFileSetParameterBool");
  }
  template <class Function>
  void find(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
  }
  bool complete() const { return open && close && properties && add_file && remove_file && add_memory && remove_memory && read; }

  void* library;
  Status (*open)();
  Status (*close)();
  Status (*properties)(Properties*);
  Status (*add_file)(Handle*, FileDescription*);
  void (*remove_file)(Handle);
  Status (*add_memory)(const void*, std::size_t, int);
  Status (*remove_memory)(const void*);
  Status (*limit_memory)(std::size_t);  // in KiB, of all that the process registers
  ssize_t (*read)(Handle, void*, std::size_t, off_t, off_t);
  Status (*get)(int, bool*);
  Status (*set)(int, bool);
};

namespace {

// The library has one driver per process: the first CuFile opens it, the last one closes it.
struct Driver {
  unsigned users = 0;
  bool ours = false, may_copy = false;  // as it was before
};
std::mutex drivers_mutex;
std::map<void*, Driver>& drivers() {
  static std::map<void*, Driver> known;
  return known;
}

// Settings that copy through host memory whatever kMayCopy says. A version that does not know one refuses its number; cufile.h has the last
// two since version 1.20.
constexpr struct {
  int number;
  const char* name;
} kCopies[] = {{2, "force_compat_mode"}, {12, "vanilla_posix_io_mode"}, {13, "gds_fallback_io"}};

// Whether it could copy through host memory of its own, silently; every setting that it has says that it could not.
std::string way_out(const CuFile::Functions& cufile) {
  bool may = false;
  if (cufile.get && cufile.get(kMayCopy, &may).code == 0) {
    for (const auto& setting : kCopies) {
      bool copies = false;
      if (cufile.get(setting.number, &copies).code == 0 && copies)
        return "its cufile.json lets it copy through host memory (" + std::string(setting.name) + ")";
    }
  } else {
    Properties properties{};
    check(cufile.properties(&properties), "its properties cannot be had");
    may = properties.controls & kMayCopyBit;
  }
  return may ? "it may copy through host memory; set allow_compat_mode to false in its cufile.json" : "";
}

void shut(const CuFile::Functions& cufile, const Driver& driver) {
  if (driver.ours) cufile.close();
  if (driver.may_copy) cufile.set(kMayCopy, true);
}

void open(const CuFile::Functions& cufile) {
  std::lock_guard<std::mutex> lock(drivers_mutex);
  Driver& driver = drivers()[cufile.library];
  if (driver.users == 0) {
    driver = {};
    if (cufile.get && cufile.set && cufile.get(kMayCopy, &driver.may_copy).code == 0) cufile.set(kMayCopy, false);
    const Status status = cufile.open();
    driver.ours = status.code == 0;
    try {
      if (status.code != kAlreadyOpen) check(status, "the driver of GPUDirect Storage cannot be opened");
      const std::string problem = way_out(cufile);
      if (!problem.empty()) throw std::runtime_error("libcufile does not promise to go past host memory: " + problem);
    } catch (...) {
      shut(cufile, driver);
      throw;
    }
  }
  ++driver.users;
}

void close(const CuFile::Functions& cufile) {
  std::lock_guard<std::mutex> lock(drivers_mutex);
  Driver& driver = drivers()[cufile.library];
  if (--driver.users == 0) shut(cufile, driver);
}

// The CUDA context of the thread that makes an engine becomes that of the engine's threads, which do not break graphs that other threads
// capture (see `ignore_captures` in ../cuda/kernels.h). Null functions: there is no CUDA.
struct Context {
  Context() {
    void* cuda = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (!cuda) return;
    const auto get = reinterpret_cast<int (*)(void**)>(::dlsym(cuda, "cuCtxGetCurrent"));
    set = reinterpret_cast<int (*)(void*)>(::dlsym(cuda, "cuCtxSetCurrent"));
    exchange_mode = reinterpret_cast<int (*)(int*)>(::dlsym(cuda, "cuThreadExchangeStreamCaptureMode"));
    if (!get || get(&context) != 0) context = nullptr;
  }
  void take() const {
    if (set && context) set(context);
    int mode = kThreadLocal;
    if (exchange_mode) exchange_mode(&mode);
  }
  static constexpr int kThreadLocal = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
  int (*set)(void*) = nullptr;
  int (*exchange_mode)(int*) = nullptr;
  void* context = nullptr;
};

class CuFileEngine final : public WorkerEngine {
 public:
  CuFileEngine(const Options& options, std::shared_ptr<CuFile> cufile, const File& file)
      : WorkerEngine(options), cufile_(std::move(cufile)), descriptor_(file.descriptor()) {
    if (!file.direct()) throw std::runtime_error(file.path() + " is not open with O_DIRECT");
    FileDescription description{};
    description.type = kFileNumber;
    description.handle.number = descriptor_->number;
    check(cufile_->functions().add_file(&handle_, &description), file.path() + " cannot be read straight to a GPU");
    try {
      start();
    } catch (...) {
      cufile_->functions().remove_file(handle_);
      throw;
    }
  }
  ~CuFileEngine() override {
    join();
    cufile_->functions().remove_file(handle_);
  }
  const char* kind() const override { return "cufile"; }

 private:
  void begin() override { context_.take(); }

  // Nothing can be patched or copied in memory that the host does not reach.
  void admit(Operation operation, const File& file, const Part& part) const override {
    if (operation != Operation::read) throw std::invalid_argument("this engine only reads");
    if (file.descriptor() != descriptor_) throw std::invalid_argument("this engine reads the file that it was made for");
    if (part.offset % kAlignment || part.bytes % kAlignment || reinterpret_cast<std::uintptr_t>(part.memory) % kAlignment)
      throw std::invalid_argument("offset, size and address must be multiples of 4096");
    if (!cufile_->holds(part.memory, part.bytes)) throw std::invalid_argument("the memory is not registered");
  }
  bool registered(const void*, std::size_t) const override { return true; }

  int execute(const Call& call) override {
    char* base = static_cast<char*>(cufile_->memory());
    errno = 0;
    const ssize_t result = cufile_->functions().read(handle_, base, call.bytes, static_cast<off_t>(call.offset),
                                                     static_cast<char*>(call.memory) - base);
    if (result == -1) return errno ? -errno : -EIO;
    return static_cast<int>(std::clamp<ssize_t>(result, INT_MIN, INT_MAX));  // another negative one is a code of cuFile's
  }

  const std::shared_ptr<CuFile> cufile_;
  const std::shared_ptr<const Descriptor> descriptor_;
  const Context context_;
  Handle handle_ = nullptr;
};

}  // namespace

CuFile::CuFile(const std::vector<std::string>& libraries) {
  for (const std::string& name : libraries) {
    // It is never unloaded: it leaves threads and thread-local objects behind.
    void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) continue;
    auto functions = std::make_unique<Functions>(library);
    if (!functions->complete()) throw std::runtime_error(name + " is not the libcufile that is known");
    open(*functions);
    functions_ = std::move(functions);
    return;
  }
  throw std::runtime_error("libcufile is not installed");
}

CuFile::~CuFile() {
  if (memory_) functions_->remove_memory(memory_);
  close(*functions_);
}

void CuFile::register_memory(void* memory, std::size_t bytes) {
  if (memory_) throw std::invalid_argument("memory is registered already");
  Status status = functions_->add_memory(memory, bytes, 0);
  // A process may register 32 GiB in all where cufile.json says nothing else. What others registered of that stays theirs.
  if (status.code != 0 && functions_->limit_memory && functions_->limit_memory((bytes + kLimit) / 1024).code == 0) {
    status = functions_->add_memory(memory, bytes, 0);
  }
  check(status, std::to_string(bytes) + " bytes on the GPU cannot be registered");
  memory_ = memory;
  bytes_ = bytes;
}

bool CuFile::holds(const void* memory, std::size_t bytes) const {
  const auto from = reinterpret_cast<std::uintptr_t>(memory), base = reinterpret_cast<std::uintptr_t>(memory_);
  return from >= base && bytes <= bytes_ && from - base <= bytes_ - bytes;
}

std::unique_ptr<Engine> make_cufile(const Options& options, std::shared_ptr<CuFile> cufile, const File& file) {
  return std::make_unique<CuFileEngine>(options, std::move(cufile), file);
}

}  // namespace infinity::aio
