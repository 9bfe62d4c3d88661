#include <arm_neon.h>

#include "instruction_set.h"

namespace infinity::cpu_adam {
namespace {

struct Neon {
  using Reg = float32x4_t;
  using Bits = uint32x4_t;
  using Ints = int32x4_t;
  static constexpr std::size_t width = 4;

  static Reg all(float value) { return vdupq_n_f32(value); }
  static Bits lanes() { return Bits{0, 1, 2, 3}; }
  static Reg sqrt(Reg x) { return vsqrtq_f32(x); }
  static Reg to_float(Ints x) { return vcvtq_f32_s32(x); }
  static Ints to_int(Reg x) { return vcvtq_s32_f32(x); }
  static std::uint32_t max(Bits x) { return vmaxvq_u32(x); }

  static Reg load(const float* from) { return vld1q_f32(from); }
  static void store(float* to, Reg x) { vst1q_f32(to, x); }
  static void stream(float* to, Reg x) { store(to, x); }  // there are hints only, for pairs of registers
  static Reg load_fp16(const std::uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
  static Bits to_fp16(Reg x) { return vmovl_u16(vreinterpret_u16_f16(vcvt_f16_f32(x))); }
  static Bits load_halves(const std::uint16_t* from) { return vmovl_u16(vld1_u16(from)); }
  static void store_halves(std::uint16_t* to, Bits x) { vst1_u16(to, vmovn_u32(x)); }
  static void stream_halves(std::uint16_t* to, Bits x) { store_halves(to, x); }
  static Bits load_bytes(const std::uint8_t* from) {
    std::uint32_t four;
    std::memcpy(&four, from, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
  }
  static void store_bytes(std::uint8_t* to, Bits x) {
    const uint16x4_t halves = vmovn_u32(x);
    const std::uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
    std::memcpy(to, &four, sizeof four);
  }
  static void fence() {}
};

}  // namespace

const Kernels neon_kernels = make_kernels<Neon>(scalar_norm_blocks);

}  // namespace infinity::cpu_adam
