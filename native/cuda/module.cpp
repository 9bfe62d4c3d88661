// infinity._cuda: the kernels for Python. Addresses and streams are integers; the caller keeps the memory alive.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "kernels.h"

namespace py = pybind11;
using namespace infinity::cuda;

namespace {

Dtype parse_dtype(const std::string& name) {
  if (name == "fp32") return Dtype::fp32;
  if (name == "bf16") return Dtype::bf16;
  if (name == "fp16") return Dtype::fp16;
  throw std::invalid_argument("unknown dtype '" + name + "'; expected fp32, bf16 or fp16");
}

template <typename T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void py_accumulate(std::uintptr_t dst, std::uintptr_t src, const std::string& dtype, std::size_t n, bool first,
                   std::uintptr_t stream) {
  accumulate(pointer<void>(dst), pointer<const void>(src), parse_dtype(dtype), n, first, stream);
}

void py_squared_norm(std::uintptr_t address, const std::string& dtype, std::size_t n, std::uintptr_t block_sums,
                     std::uintptr_t total, std::uintptr_t stream) {
  squared_norm(pointer<const void>(address), parse_dtype(dtype), n, pointer<double>(block_sums), pointer<double>(total),
               stream);
}

void py_adam_step(std::uintptr_t grad, const std::string& grad_dtype, std::uintptr_t master, std::uintptr_t exp_avg,
                  std::uintptr_t exp_avg_sq, std::uintptr_t out, const std::string& out_dtype, std::size_t n, double lr,
                  double beta1, double beta2, double eps, double weight_decay, double bias_correction1,
                  double bias_correction2_sqrt, double grad_scale, bool decoupled, std::uintptr_t stream) {
  const Arrays arrays{pointer<const void>(grad), parse_dtype(grad_dtype), pointer<float>(master), pointer<float>(exp_avg),
                      pointer<float>(exp_avg_sq), pointer<void>(out), parse_dtype(out_dtype)};
  const Hyper hyper{lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt, grad_scale, decoupled};
  adam_step(arrays, n, hyper, stream);
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  using without_gil = py::call_guard<py::gil_scoped_release>;

  m.def("unavailable_reason", &unavailable_reason, without_gil(),
        "Why kernels cannot run in this process (no driver, no device); an empty string when they can.");
  m.def("accumulate", &py_accumulate, without_gil(), py::arg("dst"), py::arg("src"), py::arg("dtype"), py::arg("n"),
        py::kw_only(), py::arg("first"), py::arg("stream"),
        "dst = src when first, else dst + src rounded as torch's add; n elements at these addresses.");
  m.def("norm_blocks", &norm_blocks, py::arg("n"), "Doubles of device memory that squared_norm needs as block_sums.");
  m.def("squared_norm", &py_squared_norm, without_gil(), py::arg("address"), py::arg("dtype"), py::arg("n"), py::kw_only(),
        py::arg("block_sums"), py::arg("total"), py::arg("stream"),
        "Add the sum of squares to the double at `total`, in the order of _cpu_adam.squared_norm.");
  m.def("adam_step", &py_adam_step, without_gil(), py::arg("grad"), py::arg("grad_dtype"), py::arg("master"),
        py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("out"), py::arg("out_dtype"), py::arg("n"), py::kw_only(),
        py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
        py::arg("bias_correction1"), py::arg("bias_correction2_sqrt"), py::arg("grad_scale"), py::arg("decoupled"),
        py::arg("stream"), "One Adam update in place; see native/cpu_adam/cpu_adam.h for the arithmetic.");
}
