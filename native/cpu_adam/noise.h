// The random bits of stochastic rounding: 32 for each element, 16 for either moment. They are a function of a key and of the element's
// number in its unit alone, in integer arithmetic, so they are the same for every instruction set, cut and placement.
#pragma once

#include <cstdint>

#include "convert.h"

namespace infinity::cpu_adam {

// The part that is the same for 2^32 elements: the key and the upper half of their numbers, mixed. `between` includes its part of the
// xor-shift after it.
struct Noise {
  std::uint32_t before, between;
};

namespace {

inline Noise make_noise(std::uint64_t key, std::uint64_t number) {  // splitmix64's finalizer
  std::uint64_t x = key + ((number >> 32) + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  x ^= x >> 31;
  const auto half = static_cast<std::uint32_t>(x >> 32);
  return {static_cast<std::uint32_t>(x), half ^ half >> 11};
}

// Three rounds of xor-shift and multiply (C. Wellons's "triple32", every output bit depends on every input bit; two rounds are
// measurably uneven over strides of elements). The second half of the seed enters after the first, so that two steps are not one
// sequence read from two places; (x ^ half) ^ (x ^ half) >> 11 is x ^ x >> 11 ^ between.
//
// The first shift leaves nothing of the lower 17 bits behind. So what it makes of a group's first element, whose number is a multiple of
// kGroup, is that of element j of the group but for the bits of j: begin_noise(seed, number + j) == begin_noise(seed, number) ^ j.
template <class Bits>
INFINITY_INLINE Bits begin_noise(const Noise& seed, Bits number) {
  const Bits x = number ^ seed.before;
  return x ^ x >> 17;
}
template <class Bits>
INFINITY_INLINE Bits end_noise(const Noise& seed, Bits x) {
  x = x * 0xed5ad4bbu;
  x = (x ^ x >> 11 ^ seed.between) * 0xac4c1b51u;
  x = (x ^ x >> 15) * 0x31848babu;
  return x ^ x >> 14;
}
template <class Bits>
INFINITY_INLINE Bits noise_of(const Noise& seed, Bits number) {
  return end_noise(seed, begin_noise(seed, number));
}

}  // namespace
}  // namespace infinity::cpu_adam
