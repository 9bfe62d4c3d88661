// The registers of a GPU for the kernels of native/cpu_adam: eight neighbouring lanes of a warp work on one group, and each of them on four
// neighbours of it, so that a lane reads 16, 8 or 4 bytes at once and a warp a stretch without gaps. A register is a float here, and what is
// in it belongs to this lane; register k of a lane holds element 4 * lane + k.
//
// Whatever is decided for a group is decided alike by its eight lanes, so they do not part; other octets of the warp may go other ways.
// Addresses of a group must be multiples of four elements.
#pragma once

#include "../cpu_adam/update.h"

namespace infinity::cpu_adam {
namespace {

struct Octet {
  using Reg = float;
  using Bits = std::uint32_t;
  using Ints = std::int32_t;
  static constexpr std::size_t width = 8;

  INFINITY_INLINE static unsigned lane() { return threadIdx.x % 8; }
  INFINITY_INLINE static Bits lanes() { return 4 * lane(); }
  INFINITY_INLINE static Reg all(float value) { return value; }
  INFINITY_INLINE static Reg sqrt(Reg x) { return root_of(x); }

  // The units that convert between integers and floats are few, and roots need them: a sum with a large number has the integer in its
  // last bits. Exact for |x| < 2^22, and for 0 <= x < 2^23, of which the codes and the noise are far.
  INFINITY_INLINE static Reg to_float(Ints x) { return from_bits(to_bits(0x1.8p23f) + static_cast<Bits>(x)) - 0x1.8p23f; }
  INFINITY_INLINE static Ints to_int(Reg x) { return static_cast<Ints>(to_bits(__fadd_rz(x, 0x1p23f)) - to_bits(0x1p23f)); }

  INFINITY_INLINE static std::uint32_t max(Bits x) {
    const unsigned mine = 0xffu << (threadIdx.x & 24);
    INFINITY_UNROLL for (int apart = 4; apart > 0; apart /= 2) {
      const Bits other = __shfl_xor_sync(mine, x, apart);
      x = x > other ? x : other;
    }
    return x;
  }

  INFINITY_INLINE static Bits to_fp16(Reg x) { return cpu_adam::to_fp16(x); }
};

template <>
struct Group<Octet> {
  static constexpr std::size_t step = 1;

  template <class F>
  INFINITY_INLINE static void load(const float* from, F f) {
    const float4 x = reinterpret_cast<const float4*>(from)[Octet::lane()];
    f(0, x.x), f(1, x.y), f(2, x.z), f(3, x.w);
  }
  template <class F>
  INFINITY_INLINE static void load_halves(const std::uint16_t* from, F f) {
    const uint2 x = reinterpret_cast<const uint2*>(from)[Octet::lane()];
    f(0, x.x & 0xffffu), f(1, x.x >> 16), f(2, x.y & 0xffffu), f(3, x.y >> 16);
  }
  template <class F>
  INFINITY_INLINE static void load_halves(const std::uint16_t* from, const std::uint16_t* other, F f) {
    const uint2 x = reinterpret_cast<const uint2*>(from)[Octet::lane()], y = reinterpret_cast<const uint2*>(other)[Octet::lane()];
    f(0, x.x & 0xffffu, y.x & 0xffffu), f(1, x.x >> 16, y.x >> 16), f(2, x.y & 0xffffu, y.y & 0xffffu), f(3, x.y >> 16, y.y >> 16);
  }
  template <class F>
  INFINITY_INLINE static void load_fp16(const std::uint16_t* from, F f) {
    load_halves(from, [&](std::size_t k, std::uint32_t half) INFINITY_INLINE_LAMBDA { f(k, from_fp16(static_cast<std::uint16_t>(half))); });
  }
  template <class F>
  INFINITY_INLINE static void load_bytes(const std::uint8_t* from, F f) {
    const std::uint32_t x = reinterpret_cast<const std::uint32_t*>(from)[Octet::lane()];
    f(0, x & 0xffu), f(1, x >> 8 & 0xffu), f(2, x >> 16 & 0xffu), f(3, x >> 24);
  }
  template <class F>
  INFINITY_INLINE static void store(float* to, F f) {
    reinterpret_cast<float4*>(to)[Octet::lane()] = float4{f(0), f(1), f(2), f(3)};
  }
  template <class F>
  INFINITY_INLINE static void store_halves(std::uint16_t* to, F f) {
    reinterpret_cast<uint2*>(to)[Octet::lane()] = uint2{f(0) | f(1) << 16, f(2) | f(3) << 16};
  }
  template <class F>
  INFINITY_INLINE static void stream(float* to, F f) {
    store(to, f);
  }
  template <class F>
  INFINITY_INLINE static void stream_halves(std::uint16_t* to, F f) {
    store_halves(to, f);
  }
  template <class F>
  INFINITY_INLINE static void store_bytes(std::uint8_t* to, F f) {
    reinterpret_cast<std::uint32_t*>(to)[Octet::lane()] = f(0) | f(1) << 8 | f(2) << 16 | f(3) << 24;
  }
  INFINITY_INLINE static void store_scale(float* to, float scale) {
    if (Octet::lane() == 0) *to = scale;
  }
};

}  // namespace
}  // namespace infinity::cpu_adam
