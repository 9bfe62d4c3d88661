// infinity._cpu_adam: the kernels for Python. Addresses are integers, and 0 is null; the caller keeps the memory alive.
#include "binding.h"
#include "pool.h"

namespace py = pybind11;
using namespace infinity::cpu_adam;

namespace {

constexpr Names<Isa, 4> kIsas = {{"scalar", Isa::scalar}, {"neon", Isa::neon}, {"avx2", Isa::avx2}, {"avx512", Isa::avx512}};
constexpr Names<Moment, 2> kMoments = {{"first", Moment::first}, {"second", Moment::second}};

Isa parse_isa(std::string_view name) { return parse("instruction set", kIsas, name); }

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

void py_add(std::uintptr_t target, std::uintptr_t source, std::string_view dtype, std::size_t n, std::string_view isa, Pool& pool) {
  const Dtype type = parse("dtype", kDtypes, dtype);
  add(pointer<void>("target", target, alignment_of(type), unless_empty(n)),
      pointer<const void>("source", source, alignment_of(type), unless_empty(n)), type, n, parse_isa(isa), pool);
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
  using Address = std::uintptr_t;
  define_update<std::string_view, Pool&, Address, Address, Address, Address, Address>(
        m,
        "One update of elements [begin, end) of the chunk at these addresses: in place, but for what has an address `to_...`, which gets "
        "what is made of it. `rule`: adam, adagrad, lion, ademamix or sgd; dtypes: fp32, "
        "bf16, fp16; `master_format`: none, fp32, split; `moment_format`: fp32, bf16, int8. `position` is the number of the chunk's first "
        "element in its unit, `key` any 64 bits that differ from step to step and unit to unit. See native/cpu_adam/cpu_adam.h.",
        [](Rule rule, const Chunk& chunk, std::size_t begin, std::size_t end, const Hyper& hyper, std::string_view isa, Pool& pool,
           Address param, Address master, Address first, Address second, Address slow) {
          const std::size_t moments = alignment_of(chunk.moments);
          const Targets targets{pointer<void>("to_param", param, alignment_of(chunk.param_dtype)),
                                pointer<void>("to_master", master, chunk.master_format == Master::fp32 ? 4 : 2),
                                pointer<void>("to_first", first, moments), pointer<void>("to_second", second, moments),
                                pointer<void>("to_slow", slow, moments)};
          update(rule, chunk, begin, end, hyper, parse_isa(isa), pool, targets);
        },
        arg("isa"), arg("pool"), arg("to_param") = 0, arg("to_master") = 0, arg("to_first") = 0, arg("to_second") = 0,
        arg("to_slow") = 0);
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
  m.def("add", &py_add, without_gil(), arg("target"), arg("source"), arg("dtype"), arg("n"), arg("isa"), arg("pool"),
        "target += source for n elements, added in fp32 and rounded to nearest even as torch's add; every NaN is the same one.");
  m.def("copy", [](std::uintptr_t target, std::uintptr_t source, std::size_t n, Pool& pool) {
    copy(pointer<void>("target", target, 1, unless_empty(n)), pointer<const void>("source", source, 1, unless_empty(n)), n, pool);
  }, without_gil(), arg("target"), arg("source"), arg("n"), arg("pool"), "n bytes from `source` to `target`, which do not overlap.");
  m.def("in_place_update", [](std::uintptr_t a, std::uintptr_t b, std::uintptr_t c, std::size_t n, Pool& pool) {
    in_place_update(pointer<float>("a", a, 4, unless_empty(n)), pointer<const float>("b", b, 4, unless_empty(n)),
                    pointer<float>("c", c, 4, unless_empty(n)), n, pool);
  }, without_gil(), arg("a"), arg("b"), arg("c"), arg("n"), arg("pool"), "a = 0.9 a + b, c = 0.9 c + b over n fp32: what memory gives.");
  m.def("shadow_update", [](std::uintptr_t a, std::uintptr_t b, std::uintptr_t c, std::uintptr_t to_a, std::uintptr_t to_c, std::size_t n,
                            Pool& pool) {
    shadow_update(pointer<const float>("a", a, 4, unless_empty(n)), pointer<const float>("b", b, 4, unless_empty(n)),
                  pointer<const float>("c", c, 4, unless_empty(n)), pointer<float>("to_a", to_a, 4, unless_empty(n)),
                  pointer<float>("to_c", to_c, 4, unless_empty(n)), n, pool);
  }, without_gil(), arg("a"), arg("b"), arg("c"), arg("to_a"), arg("to_c"), arg("n"), arg("pool"),
        "to_a = 0.9 a + b, to_c = 0.9 c + b over n fp32: what memory gives to an update to another place.");
}
