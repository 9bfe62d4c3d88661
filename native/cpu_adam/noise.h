// The random bits of stochastic rounding: 32 for each element, 16 for either moment. They are a function of a key and of the element's
// number in its unit alone, in integer arithmetic, so they are the same for every instruction set, cut and placement.
#pragma once

#include <cstdint>

#include "convert.h"

namespace infinity::cpu_adam {

// What is the same for 2^32 elements: the key and the upper half of their numbers, mixed.
struct Noise {
  std::uint32_t before, between;
};

namespace {

inline Noise make_noise(std::uint64_t key, std::uint64_t number) {  // splitmix64's finalizer
  std::uint64_t x = key + ((number >> 32) + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  x ^= x >> 31;
  return {static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32)};
}

// Three rounds of xor-shift and multiply (C. Wellons's "triple32", every output bit depends on every input bit; two rounds are
// measurably uneven over strides of elements). The second half of the seed enters after the first, so that two steps are not one
// sequence read from two places.
template <class Bits>
INFINITY_INLINE Bits noise_of(const Noise& seed, Bits number) {
  Bits x = number ^ seed.before;
  x = (x ^ x >> 17) * 0xed5ad4bbu;
  x = x ^ seed.between;
  x = (x ^ x >> 11) * 0xac4c1b51u;
  x = (x ^ x >> 15) * 0x31848babu;
  return x ^ x >> 14;
}

}  // namespace
}  // namespace infinity::cpu_adam
