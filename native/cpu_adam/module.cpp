// infinity._cpu_adam: the kernels for Python. Addresses are integers, and 0 is null; the caller keeps the memory alive.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cpu_adam.h"
#include "pool.h"

namespace py = pybind11;
using namespace infinity::cpu_adam;

namespace {

template <class T, std::size_t N>
using Names = std::pair<std::string_view, T>[N];

constexpr Names<Dtype, 3> kDtypes = {{"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}, {"fp16", Dtype::fp16}};
constexpr Names<Isa, 4> kIsas = {{"scalar", Isa::scalar}, {"neon", Isa::neon}, {"avx2", Isa::avx2}, {"avx512", Isa::avx512}};
constexpr Names<Rule, 4> kRules = {{"adam", Rule::adam}, {"adagrad", Rule::adagrad}, {"lion", Rule::lion}, {"sgd", Rule::sgd}};
constexpr Names<Master, 3> kMasters = {{"none", Master::none}, {"fp32", Master::fp32}, {"split", Master::split}};
constexpr Names<Format, 3> kFormats = {{"fp32", Format::fp32}, {"bf16", Format::bf16}, {"int8", Format::int8}};
constexpr Names<Moment, 2> kMoments = {{"first", Moment::first}, {"second", Moment::second}};

template <class T, std::size_t N>
T parse(const char* what, const std::pair<std::string_view, T> (&names)[N], std::string_view name) {
  std::string known;
  for (const auto& [known_name, value] : names) {
    if (known_name == name) return value;
  }
  for (const auto& [known_name, value] : names) {
    known.append(known.empty() ? "" : &value == &names[N - 1].second ? " or " : ", ").append(known_name);
  }
  throw std::invalid_argument(std::string("unknown ") + what + " '" + std::string(name) + "'; expected " + known);
}

Isa parse_isa(std::string_view name) { return parse("instruction set", kIsas, name); }

enum class Null { allowed, refused };

template <class T>
T* pointer(const char* name, std::uintptr_t address, std::size_t alignment, Null null = Null::allowed) {
  if (address == 0 && null == Null::refused) throw std::invalid_argument(std::string(name) + " must not be null");
  if (address % alignment != 0) throw std::invalid_argument(std::string(name) + " is not aligned to its element size");
  return reinterpret_cast<T*>(address);
}

std::size_t alignment_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }
std::size_t alignment_of(Format format) { return format == Format::bf16 ? 2 : 4; }  // int8: of its scales
Null unless_empty(std::size_t n) { return n == 0 ? Null::allowed : Null::refused; }  // an empty tensor's address is null

void py_update(std::string_view rule, std::uintptr_t grad, std::string_view grad_dtype, std::uintptr_t param, std::string_view param_dtype,
               std::uintptr_t master, std::string_view master_format, std::uintptr_t first, std::uintptr_t second,
               std::string_view moment_format, std::size_t begin, std::size_t end, std::uint64_t position, std::uint64_t key, double lr,
               double beta1, double beta2, double eps, double weight_decay, double bias_correction1, double bias_correction2_sqrt,
               bool decoupled, double momentum, double dampening, bool nesterov, bool first_step, double grad_scale,
               std::string_view isa, Pool& pool) {
  const Dtype grad_type = parse("dtype", kDtypes, grad_dtype), param_type = parse("dtype", kDtypes, param_dtype);
  const Master master_type = parse("master format", kMasters, master_format);
  const Format moments = parse("moment format", kFormats, moment_format);
  const Chunk chunk{pointer<const void>("grad", grad, alignment_of(grad_type)), grad_type,
                    pointer<void>("param", param, alignment_of(param_type)), param_type,
                    pointer<void>("master", master, master_type == Master::fp32 ? 4 : 2), master_type,
                    pointer<void>("first", first, alignment_of(moments)), pointer<void>("second", second, alignment_of(moments)),
                    moments, position, key};
  const Hyper hyper{lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt, grad_scale, decoupled,
                    momentum, dampening, nesterov, first_step};
  update(parse("rule", kRules, rule), chunk, begin, end, hyper, parse_isa(isa), pool);
}

void py_decode(std::uintptr_t address, std::string_view format, std::string_view moment, std::uintptr_t values, std::size_t begin,
               std::size_t n) {
  const Format type = parse("moment format", kFormats, format);
  decode(pointer<const void>("address", address, alignment_of(type), unless_empty(n)), type, parse("moment", kMoments, moment),
         pointer<float>("values", values, 4, unless_empty(n)), begin, n);
}

void py_encode(std::uintptr_t address, std::string_view format, std::string_view moment, std::uintptr_t values, std::size_t begin,
               std::size_t n) {
  const Format type = parse("moment format", kFormats, format);
  encode(pointer<void>("address", address, alignment_of(type), unless_empty(n)), type, parse("moment", kMoments, moment),
         pointer<const float>("values", values, 4, unless_empty(n)), begin, n);
}

double norm(std::uintptr_t address, std::string_view dtype, std::size_t n, double carry, std::string_view isa, Pool& pool) {
  const Dtype type = parse("dtype", kDtypes, dtype);
  return squared_norm(pointer<const void>("address", address, alignment_of(type), unless_empty(n)), type, n, carry, parse_isa(isa), pool);
}

}  // namespace

PYBIND11_MODULE(_cpu_adam, m) {
  using without_gil = py::call_guard<py::gil_scoped_release>;
  using py::arg;

  py::class_<Pool>(m, "Pool", "Worker threads for the kernels; `threads` counts the calling thread.")
      .def(py::init<int>(), arg("threads"))
      .def_property_readonly("threads", &Pool::threads);

  m.attr("NORM_BLOCK") = kNormBlock;
  m.attr("GROUP") = kGroup;
  m.attr("SUPERBLOCK") = kSuperblock;
  m.def("best_isa", [] {
    for (const auto& [name, isa] : kIsas) {
      if (isa == best_isa()) return std::string(name);
    }
    return std::string("scalar");
  }, "The best instruction set that this CPU has.");
  m.def("has_isa", [](std::string_view name) { return has_isa(parse_isa(name)); }, arg("name"));
  m.def("update", &py_update, without_gil(), arg("rule"), arg("grad"), arg("grad_dtype"), arg("param"), arg("param_dtype"), arg("master"),
        arg("master_format"), arg("first"), arg("second"), arg("moment_format"), arg("begin"), arg("end"), py::kw_only(), arg("position"),
        arg("key"), arg("lr"), arg("beta1") = 0.0, arg("beta2") = 0.0, arg("eps") = 0.0, arg("weight_decay") = 0.0,
        arg("bias_correction1") = 1.0, arg("bias_correction2_sqrt") = 1.0, arg("decoupled") = true, arg("momentum") = 0.0,
        arg("dampening") = 0.0, arg("nesterov") = false, arg("first_step") = false, arg("grad_scale") = 1.0, arg("isa"), arg("pool"),
        "One update in place of elements [begin, end) of the chunk at these addresses. `rule`: adam, adagrad, lion or sgd; dtypes: fp32, "
        "bf16, fp16; `master_format`: none, fp32, split; `moment_format`: fp32, bf16, int8. `position` is the number of the chunk's first "
        "element in its unit, `key` any 64 bits that differ from step to step and unit to unit. See native/cpu_adam/cpu_adam.h.");
  m.def("block_bytes", [](std::string_view format, std::size_t n) { return block_bytes(parse("moment format", kFormats, format), n); },
        arg("format"), arg("elements"), "Bytes of a block of moments.");
  m.def("decode", &py_decode, without_gil(), arg("address"), arg("format"), arg("kind"), arg("values"), arg("begin"), arg("n"),
        "Elements [begin, begin + n) of the block of moments at `address` to n fp32 at `values`; `kind`: first or second.");
  m.def("encode", &py_encode, without_gil(), arg("address"), arg("format"), arg("kind"), arg("values"), arg("begin"), arg("n"),
        "The reverse of decode, rounded to nearest; int8 writes whole groups of GROUP, padded with zeros.");
  m.def("join", [](std::uintptr_t param, std::uintptr_t low, std::uintptr_t values, std::size_t n) {
    join(pointer<const std::uint16_t>("param", param, 2, unless_empty(n)), pointer<const std::int16_t>("low", low, 2, unless_empty(n)),
         pointer<float>("values", values, 4, unless_empty(n)), n);
  }, without_gil(), arg("param"), arg("low"), arg("values"), arg("n"), "n fp32 masters from bf16 parameters and what they lack.");
  m.def("split", [](std::uintptr_t values, std::uintptr_t param, std::uintptr_t low, std::size_t n) {
    split(pointer<const float>("values", values, 4, unless_empty(n)), pointer<std::uint16_t>("param", param, 2, unless_empty(n)),
          pointer<std::int16_t>("low", low, 2, unless_empty(n)), n);
  }, without_gil(), arg("values"), arg("param"), arg("low"), arg("n"), "The reverse of join; NaN becomes the canonical one.");
  m.def("squared_norm", &norm, without_gil(), arg("address"), arg("dtype"), arg("n"), arg("carry"), arg("isa"), arg("pool"),
        "carry plus the sum of squares, independent of how a buffer is cut at multiples of NORM_BLOCK; finite exactly when all are.");
  m.def("in_place_update", [](std::uintptr_t a, std::uintptr_t b, std::uintptr_t c, std::size_t n, Pool& pool) {
    in_place_update(pointer<float>("a", a, 4, unless_empty(n)), pointer<const float>("b", b, 4, unless_empty(n)),
                    pointer<float>("c", c, 4, unless_empty(n)), n, pool);
  }, without_gil(), arg("a"), arg("b"), arg("c"), arg("n"), arg("pool"), "a = 0.9 a + b, c = 0.9 c + b over n fp32: what memory gives.");
}
