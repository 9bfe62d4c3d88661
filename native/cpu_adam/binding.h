// The common part of the Python modules of the CPU and CUDA kernels: names of formats, addresses, and the arguments of `update`.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cpu_adam.h"

namespace infinity::cpu_adam {

template <class T, std::size_t N>
using Names = std::pair<std::string_view, T>[N];

inline constexpr Names<Dtype, 3> kDtypes = {{"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}, {"fp16", Dtype::fp16}};
inline constexpr Names<Rule, 5> kRules = {
    {"adam", Rule::adam}, {"adagrad", Rule::adagrad}, {"lion", Rule::lion}, {"ademamix", Rule::ademamix}, {"sgd", Rule::sgd}};
inline constexpr Names<Master, 3> kMasters = {{"none", Master::none}, {"fp32", Master::fp32}, {"split", Master::split}};
inline constexpr Names<Format, 3> kFormats = {{"fp32", Format::fp32}, {"bf16", Format::bf16}, {"int8", Format::int8}};

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

enum class Null { allowed, refused };

template <class T>
T* pointer(const char* name, std::uintptr_t address, std::size_t alignment, Null null = Null::allowed) {
  if (address == 0 && null == Null::refused) throw std::invalid_argument(std::string(name) + " must not be null");
  if (address % alignment != 0) throw std::invalid_argument(std::string(name) + " is not aligned to its element size");
  return reinterpret_cast<T*>(address);
}

inline std::size_t alignment_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }
inline std::size_t alignment_of(Format format) { return format == Format::bf16 ? 2 : 4; }  // int8: of its scales
inline Null unless_empty(std::size_t n) { return n == 0 ? Null::allowed : Null::refused; }  // an empty tensor's address is null

// Defines `update`: the arguments that say what to update and how, then `places`, keyword arguments of the types Place, which say where.
// Calls call(rule, chunk, begin, end, hyper, places...) without the GIL.
template <class... Place, class Call, class... Places>
void define_update(pybind11::module_& m, const char* doc, Call call, const Places&... places) {
  using pybind11::arg;
  m.def("update",
        [call](std::string_view rule, std::uintptr_t grad, std::string_view grad_dtype, std::uintptr_t param, std::string_view param_dtype,
               std::uintptr_t master, std::string_view master_format, std::uintptr_t first, std::uintptr_t second,
               std::string_view moment_format, std::size_t begin, std::size_t end, std::uint64_t position, std::uint64_t key, double lr,
               double beta1, double beta2, double eps, double weight_decay, double bias_correction1, double bias_correction2_sqrt,
               bool decoupled, double momentum, double dampening, bool nesterov, bool first_step, double grad_scale,
               double beta3, double alpha, std::uintptr_t slow, Place... place) {
          const Dtype grad_type = parse("dtype", kDtypes, grad_dtype), param_type = parse("dtype", kDtypes, param_dtype);
          const Master master_type = parse("master format", kMasters, master_format);
          const Format moments = parse("moment format", kFormats, moment_format);
          const Chunk chunk{pointer<const void>("grad", grad, alignment_of(grad_type)), grad_type,
                            pointer<void>("param", param, alignment_of(param_type)), param_type,
                            pointer<void>("master", master, master_type == Master::fp32 ? 4 : 2), master_type,
                            pointer<void>("first", first, alignment_of(moments)), pointer<void>("second", second, alignment_of(moments)),
                            moments, position, key, pointer<void>("slow", slow, alignment_of(moments))};
          const Hyper hyper{lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt, grad_scale, decoupled,
                            momentum, dampening, nesterov, first_step, beta3, alpha};
          call(parse("rule", kRules, rule), chunk, begin, end, hyper, place...);
        },
        pybind11::call_guard<pybind11::gil_scoped_release>(), arg("rule"), arg("grad"), arg("grad_dtype"), arg("param"),
        arg("param_dtype"), arg("master"), arg("master_format"), arg("first"), arg("second"), arg("moment_format"), arg("begin"),
        arg("end"), pybind11::kw_only(), arg("position"), arg("key"), arg("lr"), arg("beta1") = 0.0, arg("beta2") = 0.0, arg("eps") = 0.0,
        arg("weight_decay") = 0.0, arg("bias_correction1") = 1.0, arg("bias_correction2_sqrt") = 1.0, arg("decoupled") = true,
        arg("momentum") = 0.0, arg("dampening") = 0.0, arg("nesterov") = false, arg("first_step") = false, arg("grad_scale") = 1.0,
        arg("beta3") = 0.0, arg("alpha") = 0.0, arg("slow") = 0, places..., doc);
}

}  // namespace infinity::cpu_adam
