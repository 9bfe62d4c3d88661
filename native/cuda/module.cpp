// infinity._cuda: the kernels for Python. Addresses and streams are integers, 0 is null; the caller keeps the memory alive.
#include "kernels.h"

#include "../cpu_adam/binding.h"

namespace py = pybind11;
using namespace infinity::cuda;
using namespace infinity::cpu_adam;

namespace {

void py_squared_norm(std::uintptr_t address, std::string_view dtype, std::size_t n, std::uintptr_t block_sums, std::uintptr_t total,
                     std::uintptr_t stream) {
  const Dtype type = parse("dtype", kDtypes, dtype);
  squared_norm(pointer<const void>("address", address, alignment_of(type), unless_empty(n)), type, n,
               pointer<double>("block_sums", block_sums, 8, unless_empty(n)), pointer<double>("total", total, 8, unless_empty(n)), stream);
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  using without_gil = py::call_guard<py::gil_scoped_release>;
  using py::arg;

  m.def("unavailable_reason", &unavailable_reason, without_gil(), arg("device") = 0,
        "Why kernels cannot run on this device (no driver, no such device, no code for it); an empty string when they can.");
  m.def("ignore_captures", &ignore_captures, without_gil(),
        "The calling thread may use its device while other threads capture CUDA graphs, and breaks none of them.");
  m.def("norm_blocks", &norm_blocks, arg("n"), "Doubles of device memory that squared_norm needs as block_sums.");
  m.def("squared_norm", &py_squared_norm, without_gil(), arg("address"), arg("dtype"), arg("n"), py::kw_only(), arg("block_sums"),
        arg("total"), arg("stream"),
        "Add the sum of squares to the double at `total`, in the order of _cpu_adam.squared_norm; finite exactly when all are.");
  define_update<std::uintptr_t>(
      m, "_cpu_adam.update on device memory: enqueued on `stream` in the place of a pool and an instruction set.",
      [](Rule rule, const Chunk& chunk, std::size_t begin, std::size_t end, const Hyper& hyper, std::uintptr_t stream) {
        infinity::cuda::update(rule, chunk, begin, end, hyper, stream);
      },
      arg("stream"));
}
