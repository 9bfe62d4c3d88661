// The registers of a GPU for the kernels of native/cpu_adam: eight neighbouring lanes of a warp work on one group, and each of them on four
// neighbours of it, so that a lane reads 16, 8 or 4 bytes at once and a warp a stretch without gaps. A register is a float here, and its
// content belongs to this lane; register k of a lane holds element 4 * lane + k of the group. A run begins with element 4 * lane, so that an
// address is computed once.
//
// The eight lanes of a group decide alike, so they do not diverge. Other octets of the warp may diverge, but each of them must come to
// every exchange. (A single lane of eight would need seven more instructions to check which lanes are there.)
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

  INFINITY_INLINE static Bits lanes() { return 0; }  // a run begins with the elements of this lane
  INFINITY_INLINE static Reg all(float value) { return value; }
  INFINITY_INLINE static Reg sqrt(Reg x) { return root_of(x); }

  INFINITY_INLINE static std::uint32_t max(Bits x) {
    INFINITY_UNROLL for (int apart = 4; apart > 0; apart /= 2) {
      const Bits other = __shfl_xor_sync(0xffffffffu, x, apart);
      x = x > other ? x : other;
    }
    // An exchange of values orders no memory. From now on, values that the lanes have read, such as the scale, may be overwritten.
    __syncwarp();
    return x;
  }

  INFINITY_INLINE static Bits to_fp16(Reg x) { return cpu_adam::to_fp16(x); }
};

// [Note: quick]
// nvcc makes ten instructions of a root and ten of a division. Half of them find out whether the numbers are so large or so small that a
// step on the way is not exact, and lead to a subroutine; the other half is below. Here one question for eight numbers comes before all of
// it: second moments from 2^-96 to 2^32 and numerators from 2^-64 to 2^64. Then divisors are from 2^-49 to 2^33, quotients from 2^-97 on,
// and whatever is left of a numerator is a multiple of 2^-112.
//
// Why are the bits the same? These are the instructions, in this order and on these operands, that nvcc has for numbers so ordinary, on
// every architecture from Turing to Blackwell; that they round correctly is what nvcc relies on. A quotient by a constant takes its
// inverse from the host, rounded, and that needs no belief. With x and y in [1, 2), q = x / y and inverse = 1 / y + d, |d| <= 2^-25:
//   q' = x inverse, rounded, is off by less than 1.5 units in the last place, so x - q' y is exact, or is rounded to 2^-24 of it.
//   The last fma rounds q + (q' - q) y d. That is wrong only where q lies nearer than 2^-22 units to a midpoint between floats. There q'
//   is one of the two floats beside it, half a unit away, x - q' y is exact, and (q' - q) y d is y d / 2 units.
//   But for a midpoint m, x - m y is not 0, and a multiple of 2^-24 units, so that q is no nearer to it than 2^-24 / y units. It is
//   enough that y^2 d < 2^-23 (1 - 2^-24), and y is at most 2 - 2^-23.
// quick.cpp has the quotients nearest to a midpoint, all of them for the greatest y, and all roots.
template <>
struct Quick<Octet> {
  static constexpr bool known = true;

  // The value of Constants::ordinary for a launch. With other constants nothing is ordinary.
  static std::uint32_t ordinary(Rule rule, const Constants& c) {
    const bool eps = c.eps >= 0 && c.eps <= 0x1p16f, correction = c.correction2 >= 0x1p-16f && c.correction2 <= 1;
    constexpr std::uint32_t range = 0x4f800000 - 0x0f800000;  // the bits of 2^32 less those of 2^-96
    return eps && (correction || rule == Rule::adagrad) ? range : 0;
  }
  template <class RuleOf>
  INFINITY_INLINE static bool ordinary(const Constants& c, const float (&g)[4], const float (&m)[4], const float (&v)[4]) {
    std::uint32_t most = 0;
    INFINITY_UNROLL for (int k = 0; k < 4; ++k) {
      const std::uint32_t second = to_bits(v[k]) - to_bits(0x1p-96f);
      const std::uint32_t numerator = to_bits(__builtin_fabsf(RuleOf::first && !RuleOf::slow ? m[k] : g[k])) - to_bits(0x1p-64f);
      most = most > second ? most : second;
      most = most > numerator ? most : numerator;
    }
    return most < c.ordinary;
  }
  // The bits of a scale.
  INFINITY_INLINE static bool ordinary(std::uint32_t scale) { return scale - to_bits(0x1p-56f) < to_bits(0x1p64f) - to_bits(0x1p-56f); }

  INFINITY_INLINE static float root(float x) {
    const float inverse = approximate_inverse_root(x), root = x * inverse;
    return __fmaf_rn(__fmaf_rn(-root, root, x), 0.5f * inverse, root);
  }
  INFINITY_INLINE static float quotient(float x, float y, float inverse) {
    const float quotient = x * inverse;
    return __fmaf_rn(__fmaf_rn(-quotient, y, x), inverse, quotient);
  }
  INFINITY_INLINE static float quotient(float x, float y) {
    const float inverse = approximate_inverse(y);
    return quotient(x, y, __fmaf_rn(inverse, __fmaf_rn(-y, inverse, 1.0f), inverse));
  }
};

// [Note: large numbers]
// The units that convert between integers and floats are few, and roots need them. The bits of 2^23 + n are those of 2^23, and n; to
// subtract 2^23 leaves n. Between 2^23 and 2^24 a sum is rounded to an integer, so that of 3 2^22 and x has x to the nearest in its bits,
// also where x is a little below zero.
constexpr float kMiddle = 0x1.8p23f;

template <>
struct Group<Octet> {
  static constexpr std::size_t step = 1;

  template <class F>
  INFINITY_INLINE static void load(const float* from, F f) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    f(0, x.x), f(1, x.y), f(2, x.z), f(3, x.w);
  }
  template <class F>
  INFINITY_INLINE static void load_halves(const std::uint16_t* from, F f) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    f(0, x.x & 0xffffu), f(1, x.x >> 16), f(2, x.y & 0xffffu), f(3, x.y >> 16);
  }
  template <class F>
  INFINITY_INLINE static void load_pairs(const std::uint16_t* from, const std::uint16_t* other, F f) {
    const uint2 x = *reinterpret_cast<const uint2*>(from), y = *reinterpret_cast<const uint2*>(other);
    const auto lower = [](std::uint32_t both) INFINITY_INLINE_LAMBDA { return static_cast<std::int32_t>(both << 16) >> 16; };
    const auto upper = [](std::uint32_t both) INFINITY_INLINE_LAMBDA { return static_cast<std::int32_t>(both) >> 16; };
    f(0, x.x << 16, lower(y.x)), f(1, x.x & 0xffff0000u, upper(y.x)), f(2, x.y << 16, lower(y.y)), f(3, x.y & 0xffff0000u, upper(y.y));
  }
  template <class F>
  INFINITY_INLINE static void load_fp16(const std::uint16_t* from, F f) {
    load_halves(from, [&](std::size_t k, std::uint32_t half) INFINITY_INLINE_LAMBDA { f(k, from_fp16(static_cast<std::uint16_t>(half))); });
  }
  template <Moment moment, class F>
  INFINITY_INLINE static void load_codes(const std::uint8_t* from, F f) {
    constexpr bool first = moment == Moment::first;  // 128 more is no less than zero
    const std::uint32_t x = *reinterpret_cast<const std::uint32_t*>(from) ^ (first ? 0x80808080u : 0);
    constexpr float zero = 0x1p23f + (first ? 128 : 0);
    f(0, from_bits(__byte_perm(x, kLarge, 0x7650)) - zero), f(1, from_bits(__byte_perm(x, kLarge, 0x7651)) - zero);
    f(2, from_bits(__byte_perm(x, kLarge, 0x7652)) - zero), f(3, from_bits(__byte_perm(x, kLarge, 0x7653)) - zero);
  }
  template <class F>
  INFINITY_INLINE static void store(float* to, F f) {
    *reinterpret_cast<float4*>(to) = float4{f(0), f(1), f(2), f(3)};
  }
  template <class F>
  INFINITY_INLINE static void store_halves(std::uint16_t* to, F f) {  // the lower ones
    *reinterpret_cast<uint2*>(to) = uint2{__byte_perm(f(0), f(1), 0x5410), __byte_perm(f(2), f(3), 0x5410)};
  }
  template <class F>
  INFINITY_INLINE static void store_lower(std::uint16_t* to, F f) {
    store_halves(to, f);
  }
  template <class F>
  INFINITY_INLINE static void store_upper(std::uint16_t* to, F f) {
    *reinterpret_cast<uint2*>(to) = uint2{__byte_perm(f(0), f(1), 0x7632), __byte_perm(f(2), f(3), 0x7632)};
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
  INFINITY_INLINE static void stream_lower(std::uint16_t* to, F f) {
    store_lower(to, f);
  }
  template <class F>
  INFINITY_INLINE static void stream_upper(std::uint16_t* to, F f) {
    store_upper(to, f);
  }
  template <class F>
  INFINITY_INLINE static void store_bytes(std::uint8_t* to, F f) {  // the lowest ones
    *reinterpret_cast<std::uint32_t*>(to) = __byte_perm(__byte_perm(f(0), f(1), 0x0040), __byte_perm(f(2), f(3), 0x0040), 0x5410);
  }
  INFINITY_INLINE static void store_scale(float* to, float scale) {
    if (threadIdx.x % 8 == 0) *to = scale;
  }
};

// [Note: codes]
// The specification (moments.h) has low = floor(sqrt(z)), by a correctly rounded root, and the code is low + 1 when u (2 low + 1) is less
// than z - low^2; that is the least integer c with c^2 + u (2 c + 1) >= z (second moments: c^4 + u ((c + 1)^4 - c^4) >= z^2).
// Whichever of c and c - 1 is asked, the same comparison gives c: so the integer asked need not be `low`, and no root need be exact. Asked
// is sqrt(z) - u to the nearest, which is c or c - 1 with much room: where the equation for c holds, sqrt(z) - u lies between c and c + 0.25
// (second moments: c + 0.48). A root is good enough when it is off by 2^-8.
//
// What is rounded could still differ where z is next to a square: tests/native/cuda/codes.cpp asks for every noise there. It does not, but
// for a z of second moments just below 129^2 and 130^2, the roots of which are rounded up to these, when u is the greatest. From below
// the two sides of the comparison are then the same, so that is looked into.
//
// A sum or product that an fma rounds once here is exact, or is rounded once in the specification.
template <>
struct Code<Octet> {
  // u and how many times it is wanted: from the bits of 2^23 + 2^16 u - 0.5.
  template <Moment moment>
  INFINITY_INLINE static float unit(std::uint32_t noise, float times) {
    const float large = from_bits(__byte_perm(noise, kLarge, moment == Moment::first ? 0x7610 : 0x7632));
    return __fmaf_rn(large, times * 0x1p-16f, times * (0.5f - 0x1p23f) * 0x1p-16f);
  }

  // The integer asked, c, as `large` = 3 2^22 + c, and what c^2 or c^4 and its share of the step above lack to z or z^2.
  struct Asked {
    float large, lacking;
    // One more where a number below zero is lacking; the lowest byte.
    INFINITY_INLINE std::uint32_t code() const { return to_bits(large) + (to_bits(lacking) >> 31); }
  };

  INFINITY_INLINE static Asked first(float z, std::uint32_t noise) {
    const float u = unit<Moment::first>(noise, 1), near = approximate_root(z) - u, large = fmaxf(near, 0) + kMiddle;
    const float c = large - kMiddle;
    return {large, u * __fmaf_rn(2.0f, c, 1.0f) - __fmaf_rn(-c, c, z)};
  }

  // With h = c + 1/2, (c + 1)^4 - c^4 is 4 h 2 (h^2 + 1/4). A code of at least 1 stays 1 when 1 is asked instead of 0.
  INFINITY_INLINE static Asked second(float z, float root, std::uint32_t noise) {
    const float u4 = unit<Moment::second>(noise, 4), near = __fmaf_rn(u4, -0.25f, approximate_root(z));
    const float least = __saturatef(root * 0x1p80f), large = fmaxf(near, least) + kMiddle;  // 1 but for a root of zero
    const float c = large - kMiddle, h = c + 0.5f, needed = u4 * (h * __fmaf_rn(h, h, 0.25f));
    return {large, needed - __fmaf_rn(-c, c, z) * __fmaf_rn(c, c, z)};
  }

  template <Moment moment, class F>
  INFINITY_INLINE static void store(std::uint8_t* to, const float (&x)[4], const std::uint32_t (&noise)[4], F z) {
    std::uint32_t code[4];
    if constexpr (moment == Moment::first) {
      INFINITY_UNROLL for (int k = 0; k < 4; ++k) {
        const auto sign = static_cast<std::uint32_t>(static_cast<std::int32_t>(to_bits(x[k])) >> 31);
        code[k] = (first(z(k), noise[k]).code() ^ sign) - sign;
      }
    } else {
      std::uint32_t nearest = 0xffffffff;  // 0 where nothing is lacking
      INFINITY_UNROLL for (int k = 0; k < 4; ++k) {
        const Asked asked = second(z(k), x[k], noise[k]);
        code[k] = asked.code();
        nearest = nearest < to_bits(asked.lacking) ? nearest : to_bits(asked.lacking);
      }
      if (nearest == 0) {
        INFINITY_UNROLL for (int k = 0; k < 4; ++k) {
          const Asked asked = second(z(k), x[k], noise[k]);
          if (asked.lacking == 0 && root_of(z(k)) >= asked.large - kMiddle + 1) ++code[k];
        }
      }
    }
    Group<Octet>::store_bytes(to, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return code[k]; });
  }
};

}  // namespace
}  // namespace infinity::cpu_adam
