// The machine of machine.h as a device of torch (PrivateUse1). Every operator is queued on the caller's stream, and runs as
// the CPU's one on the thread of that; its output has its shape at once, from the operator's meta kernel.
#include "machine.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

namespace queued {
namespace {

constexpr auto kQueued = c10::DeviceType::PrivateUse1;
using Stack = torch::jit::Stack;

// Streams

struct Streams {
  std::mutex mutex;
  std::vector<std::unique_ptr<Stream>> all;

  std::int64_t add() {
    const std::lock_guard lock(mutex);
    all.push_back(std::make_unique<Stream>(all.size()));
    return static_cast<std::int64_t>(all.size()) - 1;
  }

  Stream& at(std::int64_t number) {
    const std::lock_guard lock(mutex);
    if (all.empty()) all.push_back(std::make_unique<Stream>(0));
    return *all.at(number);
  }
};

Streams& streams() {
  static Streams* the_ones = new Streams;
  return *the_ones;
}

thread_local std::int64_t current = 0;

Stream& here() { return streams().at(current); }

c10::Stream as_torch(std::int64_t number) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kQueued, 0), number); }

// For what runs kernels of its own: a task that is run when its turn comes.
void push(std::uintptr_t stream, void (*run)(void*), void* work) {
  streams().at(static_cast<std::int64_t>(stream)).push(Kind::compute, 0, [run, work] { run(work); });
}

// Memory that comes and goes in the order of the stream that it was allocated for

struct Allocation {
  void* address;
  std::size_t nbytes;
  std::int64_t stream;
  std::vector<std::int64_t> used_on;  // by record_stream
};

struct Allocations {
  std::mutex mutex;
  std::map<void*, Allocation*> all;
};

Allocations& allocations() {
  static Allocations* the_ones = new Allocations;
  return *the_ones;
}

// As early as an allocator of a real device may: after what its stream, and those that were named, were given so far.
void free_allocation(void* context) {
  std::unique_ptr<Allocation> gone(static_cast<Allocation*>(context));
  {
    const std::lock_guard lock(allocations().mutex);
    allocations().all.erase(gone->address);
  }
  Stream& stream = streams().at(gone->stream);
  for (std::int64_t other : gone->used_on) stream.wait_for(streams().at(other).record());
  stream.push(Kind::order, 0, [address = gone->address, nbytes = gone->nbytes] {
    std::memset(machine().memory.shadow(address), 0xFF, nbytes);
    machine().memory.give_back(address, nbytes);
  });
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::Device device(kQueued, 0);
    if (nbytes == 0) return {nullptr, device};
    auto* made = new Allocation{machine().memory.allocate(nbytes), nbytes, current, {}};
    // What a caching allocator hands out has been used before.
    here().push(Kind::order, 0, [address = made->address, nbytes] { std::memset(machine().memory.shadow(address), 0xFF, nbytes); });
    const std::lock_guard lock(allocations().mutex);
    allocations().all[made->address] = made;
    return {made->address, made, &free_allocation, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override { throw std::runtime_error("copy_data"); }
};

Allocator allocator;
REGISTER_ALLOCATOR(kQueued, &allocator);

// Host memory that torch pins.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* address = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
    const std::lock_guard lock(machine().mutex);
    machine().pinned[reinterpret_cast<std::uintptr_t>(address)] = nbytes;
    return {address, address, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override { std::memcpy(target, source, nbytes); }

  static void unpin(void* address) {
    {
      const std::lock_guard lock(machine().mutex);
      machine().pinned.erase(reinterpret_cast<std::uintptr_t>(address));
    }
    std::free(address);
  }
};

PinnedAllocator pinned_allocator;

void record_on(const void* address, std::int64_t stream) {
  const std::lock_guard lock(allocations().mutex);
  const auto found = allocations().all.find(const_cast<void*>(address));
  if (found != allocations().all.end() && found->second->stream != stream) found->second->used_on.push_back(stream);
}

// What torch asks of a device with streams

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Event = std::shared_ptr<Recording>;

  c10::DeviceType type() const override { return kQueued; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kQueued, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return as_torch(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_torch(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return as_torch(streams().add()); }
  c10::Stream getNewStream(c10::Device, int) const override {
    streams().at(0);
    return as_torch(streams().add());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return as_torch(std::exchange(current, stream.id())); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = streams().at(stream.id()).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) streams().at(stream.id()).wait_for(*static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    machine().note_call();
    return event == nullptr || (*static_cast<Event*>(event))->done();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) machine().wait(**static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override { return streams().at(stream.id()).record()->done(); }
  void synchronizeStream(const c10::Stream& stream) const override { machine().wait(*streams().at(stream.id()).record()); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (std::size_t number = 0; number < streams().all.size(); ++number) machine().wait(*streams().at(number).record());
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { record_on(data.get(), stream.id()); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return machine().is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return {kQueued, 0}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    TORCH_CHECK(nbytes == 0 || storage.nbytes() == 0, "the simulated device does not move what is resized");
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(allocator.allocate(nbytes));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::globalContext().defaultGenerator(c10::kCPU);
    return generator;
  }
};

// Operators

// The CPU tensor of what lies where `tensor` says. It keeps nothing alive, as a kernel that was launched.
at::Tensor on_stream(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  void* address = tensor.numel() == 0 ? nullptr : machine().memory.shadow(tensor.const_data_ptr());
  return at::from_blob(address, tensor.sizes(), tensor.strides(), options);
}

at::Tensor on_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

bool is_queued(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kQueued; }

at::Tensor convert(const at::Tensor& tensor, bool meta) {
  if (!tensor.defined()) return tensor;
  if (is_queued(tensor)) return meta ? on_meta(tensor) : on_stream(tensor);
  if (meta && tensor.dim() > 0) return on_meta(tensor);
  // A number on the CPU: kernels take it when they are launched.
  at::Tensor value = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) value.unsafeGetTensorImpl()->set_wrapped_number(true);
  return value;
}

c10::IValue convert(const c10::IValue& value, bool meta) {
  if (value.isTensor()) return convert(value.toTensor(), meta);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(convert(each, meta));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each ? std::make_optional(convert(*each, meta)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kQueued) return c10::Device(meta ? c10::kMeta : c10::kCPU);
  return value;
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
}

// Run `work` after what the stream was given before, and wait for it.
void run_and_wait(Kind kind, std::function<void()> work) {
  std::exception_ptr failed;
  here().push(kind, 0, [&] {
    try {
      work();
    } catch (...) {
      failed = std::current_exception();
    }
  });
  machine().wait(*here().record());
  if (failed) std::rethrow_exception(failed);
}

bool writes(const c10::Argument& argument) { return argument.alias_info() != nullptr && argument.alias_info()->isWrite(); }

// The argument that a return is, or nothing.
const c10::IValue* same(const c10::FunctionSchema& schema, const c10::Argument& result, const Stack& arguments) {
  if (result.alias_info() == nullptr) return nullptr;
  TORCH_CHECK(writes(result), "the simulated device lacks the view operator ", schema.operator_name());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) return &arguments[i];
  }
  TORCH_CHECK(false, "no argument of ", schema.operator_name(), " is what it returns");
}

// Whether the meta kernel says all that the caller has to know now.
bool is_foreseeable(const c10::OperatorHandle& op) {
  for (const auto& result : op.schema().returns()) {
    const bool tensors = result.type()->isSubtypeOf(*c10::TensorType::get()) || result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensors) return false;
  }
  return !op.hasTag(at::Tag::nondeterministic_seeded) && !op.hasTag(at::Tag::dynamic_output_shape) && !op.hasTag(at::Tag::data_dependent_output);
}

// What the meta kernels say of this operator is true for GPUs: the CPU keeps mean and rstd in the dtype of the input.
void correct(const c10::OperatorHandle& op, const Stack& arguments, Stack& returns) {
  if (op.schema().name() != "aten::native_layer_norm") return;
  for (const std::size_t i : {1, 2}) returns[i] = returns[i].toTensor().to(arguments[0].toTensor().scalar_type());
}

at::Tensor like(const at::Tensor& result) {
  return result.defined() ? at::empty_strided(result.sizes(), result.strides(), result.options().device(c10::Device(kQueued, 0))) : result;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const std::size_t needed = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    TORCH_CHECK(self.numel() == 0 || self.storage().nbytes() == 0, "the simulated device does not move what is resized");
    self.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(allocator.allocate(needed));
    self.storage().unsafeGetStorageImpl()->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

// A result on its way: where it goes, and its number among the returns (and in a list).
struct Result {
  at::Tensor target;
  std::size_t number;
  std::int64_t in_list;
};

void fill(const std::vector<Result>& results, const Stack& returns) {
  for (const Result& each : results) {
    const c10::IValue& value = returns.at(each.number);
    each.target.copy_(each.in_list < 0 ? value.toTensor() : value.toTensorVector().at(each.in_list));
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto last = torch::jit::last(*stack, schema.arguments().size());
  const Stack arguments(last.begin(), last.end());
  const auto converted = [&](bool meta) {
    Stack made;
    for (const c10::IValue& each : arguments) made.push_back(convert(each, meta));
    return made;
  };
  Stack shapes = converted(true);
  bool foreseen = is_foreseeable(op);
  if (foreseen) {
    const Stack before = shapes;
    try {
      call(op, shapes);
      correct(op, arguments, shapes);
    } catch (const c10::NotImplementedError&) {
      foreseen = false;
    }
    for (std::size_t i = 0; foreseen && i < arguments.size(); ++i) {
      if (writes(schema.arguments()[i]) && arguments[i].isTensor() && arguments[i].toTensor().sizes() != before[i].toTensor().sizes())
        resize(arguments[i].toTensor(), c10::fromIntArrayRefSlow(before[i].toTensor().sizes()), std::nullopt);
    }
  }
  auto work = std::make_shared<Stack>(converted(false));
  if (!foreseen) {
    run_and_wait(Kind::compute, [&] { call(op, *work); });
    shapes = *work;
  }
  torch::jit::drop(*stack, arguments.size());
  std::vector<Result> results;
  for (std::size_t i = 0; i < schema.returns().size(); ++i) {
    if (const c10::IValue* argument = same(schema, schema.returns()[i], arguments)) {
      stack->push_back(*argument);
    } else if (shapes[i].isTensor()) {
      const at::Tensor made = like(shapes[i].toTensor());
      if (made.defined()) results.push_back({on_stream(made), i, -1});
      stack->push_back(made);
    } else if (shapes[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : shapes[i].toTensorVector()) {
        list.push_back(like(each));
        results.push_back({on_stream(list.get(list.size() - 1)), i, static_cast<std::int64_t>(list.size()) - 1});
      }
      stack->push_back(list);
    } else {
      stack->push_back(shapes[i]);
    }
  }
  if (!foreseen && results.empty()) return;
  here().push(foreseen ? Kind::compute : Kind::order, 0, [op, work, foreseen, results = std::move(results)] {
    try {
      if (foreseen) call(op, *work);
      fill(results, *work);
    } catch (const c10::Error& error) {
      throw std::runtime_error(c10::str(op.schema().name(), ": ", error.what_without_backtrace()));
    }
  });
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// As CUDA does: what is pinned is moved when its turn comes, if the caller does not wait; the rest is taken at once.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (is_queued(source) && is_queued(target)) {
    at::Tensor from = on_stream(source).expand(target.sizes());
    here().push(Kind::compute, target.nbytes(), [from, to = on_stream(target)] { to.copy_(from); });
    return target;
  }
  const bool in = is_queued(target);
  const at::Tensor& host = in ? source : target;
  machine().check_copy(host.const_data_ptr(), host.nbytes());
  const bool asynchronous = non_blocking && host.numel() > 0 && machine().is_pinned(host.const_data_ptr());
  at::Tensor raw = at::from_blob(const_cast<void*>(host.const_data_ptr()), host.sizes(), host.strides(), host.options().requires_grad(false));
  if (in) {
    at::Tensor from = (asynchronous ? raw : raw.clone()).expand(target.sizes());
    here().push(Kind::upload, target.nbytes(), [from, to = on_stream(target)] { to.copy_(from); });
    if (!non_blocking) machine().wait(*here().record());
  } else {
    at::Tensor from = on_stream(source).expand(target.sizes());
    here().push(Kind::download, target.nbytes(), [from, raw] { raw.copy_(from); });
    if (!asynchronous) machine().wait(*here().record());
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  at::Scalar found;
  const at::Tensor value = on_stream(self);
  run_and_wait(Kind::download, [&] { found = at::_local_scalar_dense(value); });
  return found;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::make_optional(offset->expect_int()) : std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(at::Tensor& self, c10::Stream stream) { record_on(self.storage().data(), stream.id()); }

int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                       std::optional<double>, bool) {
  return 0;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("view", &view);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("resize_", &resize);
  library.impl("record_stream", &record_stream);
  library.impl("_fused_sdp_choice", &math_attention);
  // Else a composite of torch, for which its backward has no counterpart here, would come before the fallback.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace queued

PYBIND11_MODULE(_queued, m) {
  using namespace queued;
  namespace py = pybind11;
  using without_gil = py::call_guard<py::gil_scoped_release>;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("current_stream", [] { return current; });
  m.def("set_stream", [](std::int64_t number) { current = number; });
  m.def("address_of_push", [] { return reinterpret_cast<std::uintptr_t>(&push); });
  m.def("shadow", [](std::uintptr_t address) {  // where streams find what lies at an address; 0 stays 0
    return address == 0 ? 0 : reinterpret_cast<std::uintptr_t>(machine().memory.shadow(reinterpret_cast<const void*>(address)));
  });
  m.def("ignore_captures", [] { ignores_captures = true; });
  m.def("pin", [](std::uintptr_t address, std::size_t nbytes) {
    machine().note_call();
    return machine().pin(address, nbytes) ? 0 : 712;  // cudaErrorHostMemoryAlreadyRegistered
  });
  m.def("unpin", [](std::uintptr_t address) {
    machine().note_call();
    return machine().unpin(address) ? 0 : 713;  // cudaErrorHostMemoryNotRegistered
  });
  m.def("registrations", [] {
    const std::lock_guard lock(machine().mutex);
    return machine().pinned;
  });
  m.def("allocated", [] {
    const std::lock_guard lock(allocations().mutex);
    std::size_t nbytes = 0;
    for (const auto& [address, one] : allocations().all) nbytes += one->nbytes;
    return nbytes;
  });
  m.def("hold", [] { here().wait_for(machine().gate = std::make_shared<Recording>()); });
  m.def("let_go", [] { machine().gate->end(); });
  m.def("synchronize", [] { Guard().synchronizeDevice(0); }, without_gil());
  m.def("set_pace", [](std::uint64_t seed, bool random, double compute_us, double copy_us, double bytes_per_us) {
    const std::lock_guard lock(machine().mutex);
    machine().pace = {seed, random, compute_us, copy_us, bytes_per_us};
  });
  m.def("counts", [] {
    const std::lock_guard lock(machine().mutex);
    const Counts& counts = machine().counts;
    py::dict found;
    found["host_waits"] = counts.host_waits;
    found["careless_calls"] = counts.careless_calls;
    found["stream_waits"] = counts.stream_waits;
    found["operators"] = counts.tasks[0];
    found["upload_bytes"] = counts.nbytes[1];
    found["download_bytes"] = counts.nbytes[2];
    found["uploads"] = counts.under_way[1];
    found["downloads"] = counts.under_way[2];
    found["upload_depths"] = counts.depths[1];
    found["download_depths"] = counts.depths[2];
    return found;
  });
  m.def("reset_counts", [] {
    const std::lock_guard lock(machine().mutex);
    const auto under_way = machine().counts.under_way;
    machine().counts = {};
    machine().counts.under_way = under_way;
  });
}
