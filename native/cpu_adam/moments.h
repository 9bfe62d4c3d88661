// How moments are kept, a group of kGroup elements at a time. Written once for all instruction sets: `V` names the types `Reg` (floats),
// `Bits` and `Ints` (32-bit integers), their `width`, and operations that the language lacks; `Group<V>` reads and writes a
// group.
//
// [Note: int8 moments]
// Each group has one fp32 scale s. The coded value is r = |m| or r = sqrt(v), by its root: elements of one group differ much in size,
// and the step divides one moment by the other, so that relative errors count:
//   first:  s = max |m|,      m = +-s (c/127)^2,   c in -127..127
//   second: s = max sqrt(v),  sqrt(v) = s (c/255)^2,   c in 0..255
// FlashOptim (arXiv 2602.23349) has these bytes with softsign for m and sqrt(v) itself. In a simulation (EMAs of gradients whose sizes
// are log-normal with sigma, beta2 = 0.999) the error of a step by m is 2.6, 5 and 10% for sigma = 0.5, 1 and 1.5, against 2.4, 10 and
// 60% with softsign, and the error of sqrt(v) 6 and 9% for 0.5 and 1, against 6 and 14%.
//
// A code is rounded stochastically to one of its neighbours, with the probability that makes the DECODED value right on average. Round to
// nearest would freeze the second moment: with beta2 = 0.999 it changes by less than half a code per step. When each gradient changes its
// size (sigma = 1), simulated, sqrt(v) is then wrong by 50 to 70%, and by 9% with stochastic rounding.
//
// A second moment that is not zero is never decoded to zero, because the step would divide by eps: its code is at least 1, and s at
// least 2^-58, whose code 1 is still an fp32. The least s of a first moment is 2^-112, so that 127^2/s is finite. A group with a
// NaN, an infinity or (second) a negative number is NaN as a whole: its scale is, and its codes are zeros. Zero bytes are zeros.
#pragma once

#include <type_traits>

#include "convert.h"
#include "cpu_adam.h"

namespace infinity::cpu_adam {

// Where consecutive elements of a moment begin. `scales` for int8 only.
struct Moments {
  void* values;
  float* scales;
};

namespace {

constexpr std::uint32_t kNearest = 0x80008000;
constexpr float kLeastFirst = 0x1p-112f, kLeastSecond = 0x1p-58f;

INFINITY_DEVICE inline std::uint16_t* halves(const Moments& at) { return static_cast<std::uint16_t*>(at.values); }
INFINITY_DEVICE inline float* floats(const Moments& at) { return static_cast<float*>(at.values); }
INFINITY_DEVICE inline std::uint8_t* codes(const Moments& at) { return static_cast<std::uint8_t*>(at.values); }

template <class V>
constexpr std::size_t kRegs = kGroup / V::width;  // registers in a group

template <class To, class From>
INFINITY_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A group in memory: calls `f(k, x)` with the content of register k, or stores what `f(k)` gives. `step` is how many elements apart the same
// lane of two neighbouring registers is. native/cuda has one of its own.
template <class V>
struct Group {
  static constexpr std::size_t step = V::width;

  template <class F>
  INFINITY_INLINE static void load(const float* from, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) f(k, V::load(from + k * step));
  }
  template <class F>
  INFINITY_INLINE static void load_fp16(const std::uint16_t* from, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) f(k, V::load_fp16(from + k * step));
  }
  template <class F>
  INFINITY_INLINE static void load_halves(const std::uint16_t* from, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) f(k, V::load_halves(from + k * step));
  }
  // Those of one as the upper halves of 32 bits, those of the other as numbers with a sign.
  template <class F>
  INFINITY_INLINE static void load_pairs(const std::uint16_t* from, const std::uint16_t* other, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) {
      f(k, V::load_halves(from + k * step) << 16, bit_cast<typename V::Ints>(V::load_halves(other + k * step) << 16) >> 16);
    }
  }
  template <class F>
  INFINITY_INLINE static void load_bytes(const std::uint8_t* from, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) f(k, V::load_bytes(from + k * step));
  }
  // Bytes as numbers: those of first moments have signs.
  template <Moment moment, class F>
  INFINITY_INLINE static void load_codes(const std::uint8_t* from, F f) {
    using Ints = typename V::Ints;
    load_bytes(from, [&](std::size_t k, typename V::Bits byte) INFINITY_INLINE_LAMBDA {
      f(k, V::to_float(moment == Moment::first ? bit_cast<Ints>(byte << 24) >> 24 : bit_cast<Ints>(byte)));
    });
  }
  template <class F>
  INFINITY_INLINE static void store(float* to, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) V::store(to + k * step, f(k));
  }
  template <class F>
  INFINITY_INLINE static void store_halves(std::uint16_t* to, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) V::store_halves(to + k * step, f(k));
  }
  template <class F>
  INFINITY_INLINE static void stream(float* to, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) V::stream(to + k * step, f(k));
  }
  template <class F>
  INFINITY_INLINE static void stream_halves(std::uint16_t* to, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) V::stream_halves(to + k * step, f(k));
  }
  // Of 32 bits the lower or the upper half.
  template <class F>
  INFINITY_INLINE static void store_lower(std::uint16_t* to, F f) {
    store_halves(to, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return f(k) & 0xffffu; });
  }
  template <class F>
  INFINITY_INLINE static void stream_lower(std::uint16_t* to, F f) {
    stream_halves(to, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return f(k) & 0xffffu; });
  }
  template <class F>
  INFINITY_INLINE static void store_upper(std::uint16_t* to, F f) {
    store_halves(to, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return f(k) >> 16; });
  }
  template <class F>
  INFINITY_INLINE static void stream_upper(std::uint16_t* to, F f) {
    stream_halves(to, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return f(k) >> 16; });
  }
  template <class F>
  INFINITY_INLINE static void store_bytes(std::uint8_t* to, F f) {
    INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) V::store_bytes(to + k * step, f(k));
  }
  // A group's one scale.
  INFINITY_INLINE static void store_scale(float* to, float scale) { *to = scale; }
};

// The two ways to store a group: through the caches, or with `streamed` past them.
template <class V, class F>
INFINITY_INLINE void put(float* to, bool streamed, F f) {
  if (streamed) {
    Group<V>::stream(to, f);
  } else {
    Group<V>::store(to, f);
  }
}
template <class V, class F>
INFINITY_INLINE void put_halves(std::uint16_t* to, bool streamed, F f) {
  if (streamed) {
    Group<V>::stream_halves(to, f);
  } else {
    Group<V>::store_halves(to, f);
  }
}
template <class V, class F>
INFINITY_INLINE void put_lower(std::uint16_t* to, bool streamed, F f) {
  if (streamed) {
    Group<V>::stream_lower(to, f);
  } else {
    Group<V>::store_lower(to, f);
  }
}
template <class V, class F>
INFINITY_INLINE void put_upper(std::uint16_t* to, bool streamed, F f) {
  if (streamed) {
    Group<V>::stream_upper(to, f);
  } else {
    Group<V>::store_upper(to, f);
  }
}

template <class V>
INFINITY_INLINE typename V::Bits bits_of(typename V::Reg x) {
  return bit_cast<typename V::Bits>(x);
}

template <class V>
INFINITY_INLINE typename V::Reg magnitude(typename V::Reg x) {
  if constexpr (std::is_same_v<typename V::Reg, float>) {
    return __builtin_fabsf(x);  // a GPU has it for nothing where it is an operand
  } else {
    return bit_cast<typename V::Reg>(bits_of<V>(x) & 0x7fffffffu);
  }
}

template <class V>
INFINITY_INLINE typename V::Reg canonical(typename V::Reg x) {
  return x == x ? x : V::all(from_bits(kCanonicalNan));
}

template <class V>
INFINITY_INLINE typename V::Reg least(typename V::Reg x, float bound) {
  return x < bound ? x : V::all(bound);
}

// 16 random bits as a number between 0 and 1, neither included: exact.
template <class V>
INFINITY_INLINE typename V::Reg unit(typename V::Bits noise) {
  return (V::to_float(bit_cast<typename V::Ints>(noise)) + 0.5f) * 0x1p-16f;
}

template <class V, Format format, Moment moment>
INFINITY_INLINE void load(const Moments& from, std::size_t i, typename V::Reg (&x)[kRegs<V>]) {
  using Reg = typename V::Reg;
  using Bits = typename V::Bits;
  if constexpr (format == Format::fp32) {
    Group<V>::load(floats(from) + i, [&](std::size_t k, Reg value) INFINITY_INLINE_LAMBDA { x[k] = value; });
  } else if constexpr (format == Format::bf16) {
    Group<V>::load_halves(halves(from) + i, [&](std::size_t k, Bits half) INFINITY_INLINE_LAMBDA { x[k] = bit_cast<Reg>(half << 16); });
  } else {
    const float scale = from.scales[i / kGroup];
    Group<V>::template load_codes<moment>(codes(from) + i, [&](std::size_t k, Reg code) INFINITY_INLINE_LAMBDA {
      if constexpr (moment == Moment::first) {
        x[k] = scale * (code * magnitude<V>(code) * (1 / 16129.0f));  // 16129 (1 / 16129) is 1 in fp32 too
      } else {
        const Reg root = scale * (code * code * (1 / 65025.0f));
        x[k] = root * root;
      }
    });
  }
}

// What takes fewer instructions for ordinary numbers, with the same bits, where an instruction set has it: of native/cuda.
template <class V>
struct Quick {
  static constexpr bool known = false;
  INFINITY_INLINE static bool ordinary(std::uint32_t) { return false; }
  INFINITY_INLINE static float quotient(float x, float y) { return x / y; }
};

// The greatest of the group's bit patterns: of magnitudes, or of roots, where every negative number and NaN is above infinity.
template <class V>
INFINITY_INLINE std::uint32_t greatest(const typename V::Bits (&bits)[kRegs<V>]) {
  auto most = bits[0];
  INFINITY_UNROLL for (std::size_t k = 1; k < kRegs<V>; ++k) most = most > bits[k] ? most : bits[k];
  return V::max(most);
}

// The 16 bits of an element's noise that belong to a moment.
template <class V, Moment moment>
INFINITY_INLINE typename V::Bits share(typename V::Bits noise) {
  if constexpr (moment == Moment::first) {
    return noise & 0xffffu;
  } else {
    return noise >> 16;
  }
}

// The codes of values that are z/127^2 (first) or z/255^2 (second) of the scale, in the lowest bytes. native/cuda has one of its own.
template <class V>
struct Code {
  using Reg = typename V::Reg;
  using Bits = typename V::Bits;
  using Ints = typename V::Ints;

  // With the sign of x. c and c + 1 stand for c^2 and (c + 1)^2.
  INFINITY_INLINE static Bits first(Reg z, Reg x, Bits noise) {
    const Ints zero{}, one = zero + 1, low = V::to_int(V::sqrt(z));
    const Reg c = V::to_float(low), square = c * c, u = unit<V>(share<V, Moment::first>(noise));
    const Ints code = low + (u * (2.0f * c + 1.0f) < z - square ? one : zero), sign = bit_cast<Ints>(bits_of<V>(x)) >> 31;
    return bit_cast<Bits>((code ^ sign) - sign) & 0xffu;
  }
  // At least 1 unless the root is zero. c and c + 1 stand for c^4 and (c + 1)^4.
  INFINITY_INLINE static Bits second(Reg z, Reg root, Bits noise) {
    const Ints zero{}, one = zero + 1, low = V::to_int(V::sqrt(z));
    const Reg c = V::to_float(low), square = c * c, u = unit<V>(share<V, Moment::second>(noise));
    const Ints code = low + (u * ((2.0f * c + 1.0f) * (2.0f * (square + c) + 1.0f)) < (z - square) * (z + square) ? one : zero);
    const Ints positive = root > V::all(0) ? one : zero;
    return bit_cast<Bits>(code > positive ? code : positive);
  }
  // Of a group; `x` is a first moment or the root of a second one, of which z(k) is made.
  template <Moment moment, class F>
  INFINITY_INLINE static void store(std::uint8_t* to, const Reg (&x)[kRegs<V>], const Bits (&noise)[kRegs<V>], F z) {
    Group<V>::store_bytes(to, [&](std::size_t k) INFINITY_INLINE_LAMBDA {
      return moment == Moment::first ? first(z(k), x[k], noise[k]) : second(z(k), x[k], noise[k]);
    });
  }
};

// `x` is a first moment, or the root of a second one, which is not -0: a decoded value is not -0, and beta2 times it and 1 - beta2 times
// a square are not both -0.
template <class V, Moment moment>
INFINITY_INLINE void store_int8(const Moments& to, std::size_t i, const typename V::Reg (&x)[kRegs<V>],
                                const typename V::Bits (&noise)[kRegs<V>]) {
  using Bits = typename V::Bits;
  constexpr bool first = moment == Moment::first;
  Bits bits[kRegs<V>];
  INFINITY_UNROLL for (std::size_t k = 0; k < kRegs<V>; ++k) bits[k] = bits_of<V>(first ? magnitude<V>(x[k]) : x[k]);
  const std::uint32_t most = greatest<V>(bits);
  constexpr float top = first ? 127 : 255, smallest = first ? kLeastFirst : kLeastSecond;
  float scale = from_bits(most), inverse;
  if (Quick<V>::ordinary(most)) {  // and above the smallest
    inverse = Quick<V>::quotient(top * top, scale);
  } else {
    if (most == 0 || most >= 0x7f800000) {
      Group<V>::store_scale(to.scales + i / kGroup, from_bits(most == 0 ? 0 : kCanonicalNan));
      Group<V>::store_bytes(codes(to) + i, [](std::size_t) INFINITY_INLINE_LAMBDA { return Bits{}; });
      return;
    }
    scale = scale < smallest ? smallest : scale;
    inverse = top * top / scale;
  }
  Group<V>::store_scale(to.scales + i / kGroup, scale);
  Code<V>::template store<moment>(codes(to) + i, x, noise, [&](std::size_t k) INFINITY_INLINE_LAMBDA {
    return least<V>((first ? magnitude<V>(x[k]) : x[k]) * inverse, top * top);
  });
}

// `root` is that of a second moment. `noise`: 16 random bits for either moment of each element; kNearest for all of them rounds to nearest.
// int8 is never `streamed`: it is bound by compute.
template <class V, Format format, Moment moment>
INFINITY_INLINE void store(const Moments& to, std::size_t i, const typename V::Reg (&x)[kRegs<V>], const typename V::Reg (&root)[kRegs<V>],
                           const typename V::Bits (&noise)[kRegs<V>], bool streamed = false) {
  if constexpr (format == Format::int8) {
    store_int8<V, moment>(to, i, moment == Moment::first ? x : root, noise);
  } else if constexpr (format == Format::fp32) {
    put<V>(floats(to) + i, streamed, [&](std::size_t k) INFINITY_INLINE_LAMBDA { return canonical<V>(x[k]); });
  } else {  // whatever is cut off goes up with the probability of its size
    put_upper<V>(halves(to) + i, streamed, [&](std::size_t k) INFINITY_INLINE_LAMBDA {
      return bits_of<V>(canonical<V>(x[k])) + share<V, moment>(noise[k]);
    });
  }
}

}  // namespace
}  // namespace infinity::cpu_adam
