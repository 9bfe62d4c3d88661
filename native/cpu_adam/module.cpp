// infinity._cpu_adam: the kernels for Python. Addresses are integers, and 0 is null; the caller keeps the memory alive.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "cpu_adam.h"
#include "pool.h"

namespace py = pybind11;
using namespace infinity::cpu_adam;

namespace {

Dtype parse_dtype(const std::string& name) {
  if (name == "fp32") return Dtype::fp32;
  if (name == "bf16") return Dtype::bf16;
  if (name == "fp16") return Dtype::fp16;
  throw std::invalid_argument("unknown dtype '" + name + "'; expected fp32, bf16 or fp16");
}

Isa parse_isa(const std::string& name) {
  if (name == "scalar") return Isa::scalar;
  if (name == "avx2") return Isa::avx2;
  if (name == "avx512") return Isa::avx512;
  throw std::invalid_argument("unknown instruction set '" + name + "'; expected scalar, avx2 or avx512");
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "scalar";
  }
}

enum class Null { allowed, refused };

template <class T>
T* pointer(const char* name, std::uintptr_t address, Dtype dtype, Null null) {
  if (address == 0 && null == Null::refused) throw std::invalid_argument(std::string(name) + " must not be null");
  if (address % (dtype == Dtype::fp32 ? 4 : 2) != 0) throw std::invalid_argument(std::string(name) + " is not aligned to its element size");
  return reinterpret_cast<T*>(address);
}

void step(std::uintptr_t grad, const std::string& grad_dtype, std::uintptr_t master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq,
          std::uintptr_t out, const std::string& out_dtype, std::size_t n, double lr, double beta1, double beta2, double eps,
          double weight_decay, double bias_correction1, double bias_correction2_sqrt, double grad_scale, bool decoupled,
          const std::string& isa, Pool& pool) {
  const Dtype grad_type = parse_dtype(grad_dtype), out_type = parse_dtype(out_dtype);
  const Null required = n == 0 ? Null::allowed : Null::refused;  // an empty tensor's address is null
  const Arrays arrays{pointer<const void>("grad", grad, grad_type, Null::allowed), grad_type,
                      pointer<float>("master", master, Dtype::fp32, required),
                      pointer<float>("exp_avg", exp_avg, Dtype::fp32, required),
                      pointer<float>("exp_avg_sq", exp_avg_sq, Dtype::fp32, required),
                      pointer<void>("out", out, out_type, Null::allowed), out_type};
  const Hyper hyper{lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt, grad_scale, decoupled};
  adam_step(arrays, n, hyper, parse_isa(isa), pool);
}

double norm(std::uintptr_t address, const std::string& dtype, std::size_t n, double carry, const std::string& isa, Pool& pool) {
  const Dtype type = parse_dtype(dtype);
  const void* values = pointer<const void>("address", address, type, n == 0 ? Null::allowed : Null::refused);
  return squared_norm(values, type, n, carry, parse_isa(isa), pool);
}

}  // namespace

PYBIND11_MODULE(_cpu_adam, m) {
  using without_gil = py::call_guard<py::gil_scoped_release>;

  py::class_<Pool>(m, "Pool", "Worker threads for the kernels; `threads` counts the calling thread.")
      .def(py::init<int>(), py::arg("threads"))
      .def_property_readonly("threads", &Pool::threads);

  m.attr("NORM_BLOCK") = kNormBlock;
  m.def("best_isa", [] { return name_of(best_isa()); }, "The widest instruction set that this CPU has.");
  m.def("has_isa", [](const std::string& name) { return has_isa(parse_isa(name)); }, py::arg("name"));
  m.def("adam_step", &step, without_gil(), py::arg("grad"), py::arg("grad_dtype"), py::arg("master"), py::arg("exp_avg"),
        py::arg("exp_avg_sq"), py::arg("out"), py::arg("out_dtype"), py::arg("n"), py::kw_only(), py::arg("lr"), py::arg("beta1"),
        py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("bias_correction1"), py::arg("bias_correction2_sqrt"),
        py::arg("grad_scale"), py::arg("decoupled"), py::arg("isa"), py::arg("pool"),
        "One Adam update in place of n elements at these addresses; see native/cpu_adam/cpu_adam.h for the arithmetic.");
  m.def("squared_norm", &norm, without_gil(), py::arg("address"), py::arg("dtype"), py::arg("n"), py::arg("carry"), py::arg("isa"),
        py::arg("pool"), "carry plus the sum of squares, independent of how a buffer is cut at multiples of NORM_BLOCK.");
}
