// The specification: what every other kernel must equal bit for bit. Registers of one element.
#include <algorithm>
#include <cmath>

#include "instruction_set.h"

namespace infinity::cpu_adam {
namespace {

struct Scalar {
  using Reg = float;
  using Bits = std::uint32_t;
  using Ints = std::int32_t;
  static constexpr std::size_t width = 1;

  static Reg all(float value) { return value; }
  static Bits lanes() { return 0; }
  static Reg sqrt(Reg x) { return std::sqrt(x); }
  static Reg to_float(Ints x) { return static_cast<float>(x); }
  static Ints to_int(Reg x) { return static_cast<Ints>(x); }  // towards zero
  static std::uint32_t max(Bits x) { return x; }

  static Reg load(const float* from) { return *from; }
  static void store(float* to, Reg x) { *to = x; }
  static void stream(float* to, Reg x) { store(to, x); }
  static Reg load_fp16(const std::uint16_t* from) { return from_fp16(*from); }
  static Bits to_fp16(Reg x) { return cpu_adam::to_fp16(x); }
  static Bits load_halves(const std::uint16_t* from) { return *from; }
  static void store_halves(std::uint16_t* to, Bits x) { *to = static_cast<std::uint16_t>(x); }
  static void stream_halves(std::uint16_t* to, Bits x) { store_halves(to, x); }
  static Bits load_bytes(const std::uint8_t* from) { return *from; }
  static void store_bytes(std::uint8_t* to, Bits x) { *to = static_cast<std::uint8_t>(x); }
  static void fence() {}
};

}  // namespace

void scalar_norm_blocks(const void* values, Dtype dtype, std::size_t n, double* sums) {
  for (std::size_t begin = 0; begin < n; begin += kNormBlock) {
    double lanes[8] = {};
    add_squares(values, dtype, begin, std::min(n, begin + kNormBlock), lanes);
    *sums++ = sum_of(lanes);
  }
}

const Kernels scalar_kernels = make_kernels<Scalar>(scalar_norm_blocks);

}  // namespace infinity::cpu_adam
