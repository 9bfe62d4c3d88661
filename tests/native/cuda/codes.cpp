// Are the codes of octet.h those of the specification? They are found from a rough root and another number than the specification's, so
// what counts is where a code changes: next to squares, where that number does, and where the comparison with the noise turns. With an
// argument it takes every noise there, in half a minute; without it the least, the greatest and every 61st.
#include "cuda_runtime.h"

#include <cstdio>
#include <random>

#include "../../../native/cuda/device.h"
#include "../../../native/cuda/octet.h"

using namespace infinity::cpu_adam;

namespace {

struct Plain {
  using Reg = float;
  using Bits = std::uint32_t;
  using Ints = std::int32_t;
  static constexpr std::size_t width = 1;
  static Reg all(float value) { return value; }
  static Reg sqrt(Reg x) { return std::sqrt(x); }
  static Reg to_float(Ints x) { return static_cast<float>(x); }
  static Ints to_int(Reg x) { return static_cast<Ints>(x); }
};

long asked = 0, wrong = 0;

// Four at a time: what is compared waits for three others.
template <Moment moment>
void compare(float z, float x, std::uint32_t noise) {
  constexpr bool first = moment == Moment::first;
  static float zs[4], xs[4];
  static std::uint32_t noises[4];
  const int at = static_cast<int>(asked++ % 4);
  zs[at] = z, xs[at] = x, noises[at] = noise;
  if (at < 3) return;
  alignas(4) std::uint8_t bytes[4];
  Code<Octet>::store<moment>(bytes, xs, noises, [&](std::size_t k) { return zs[k]; });
  for (int k = 0; k < 4; ++k) {
    const std::uint32_t code = first ? Code<Plain>::first(zs[k], xs[k], noises[k]) : Code<Plain>::second(zs[k], xs[k], noises[k]);
    if (code == bytes[k]) continue;
    if (++wrong < 10) {
      std::printf("moment %d, z %a, x %a, noise %08x: %u instead of %u\n", first ? 1 : 2, zs[k], xs[k], noises[k], bytes[k], code);
    }
  }
}

// The numbers around one, of those that are asked for.
template <Moment moment>
void compare_around(double z, std::uint32_t noise) {
  constexpr float top = moment == Moment::first ? 127.0f * 127.0f : 255.0f * 255.0f;
  const std::uint32_t middle = to_bits(static_cast<float>(z));
  for (std::uint32_t bits = middle < 6 ? 0 : middle - 6; bits <= middle + 6 && from_bits(bits) <= top; ++bits) {
    compare<moment>(from_bits(bits), bits % 2 ? 1.0f : moment == Moment::first ? -1.0f : 0x1p-75f, noise);
  }
}

template <Moment moment>
void compare_all(bool all) {
  constexpr bool first = moment == Moment::first;
  for (std::uint32_t n = 0; n < 0x10000; ++n) {
    if (!all && n >= 256 && n < 0x10000 - 256 && n % 61 != 0) continue;
    const double u = (n + 0.5) / 0x10000;
    const std::uint32_t noise = first ? n | ~n << 16 : n << 16 | (~n & 0xffff);  // the other half is another moment's
    for (int c = 0; c <= (first ? 127 : 255); ++c) {
      const double square = c * c, next = (c + 1) * (c + 1);
      compare_around<moment>(square, noise);
      const double turn = first ? square + u * (next - square) : std::sqrt(square * square + u * (next * next - square * square));
      compare_around<moment>(turn, noise);
    }
  }
  compare<moment>(0, first ? -0.0f : 0, first ? 0xffff : 0xffff0000);
  std::mt19937 random(1);
  for (int i = 0; i < 4000000; ++i) {
    const std::uint32_t noise = random(), drawn = random();
    const float z = from_bits(drawn % to_bits(first ? 127.0f * 127.0f : 255.0f * 255.0f));
    compare<moment>(z, first ? (drawn & 1 ? z : -z) : std::sqrt(z), noise);
    compare<moment>(static_cast<float>(drawn) * (first ? 0x1p-32f * 127 * 127 : 0x1p-32f * 255 * 255), 1, noise);
  }
}

// Each byte as the number that it is, whatever stands beside it.
void compare_loads() {
  for (std::uint32_t byte = 0; byte < 0x100; ++byte) {
    const std::uint32_t four = byte | (byte + 85) % 256 << 8 | (255 - byte) << 16 | (byte ^ 0x55) << 24;
    alignas(4) std::uint8_t bytes[4];
    std::memcpy(bytes, &four, 4);
    for (const bool first : {true, false}) {
      const auto check = [&](std::size_t k, float code) {
        ++asked;
        wrong += code != (first ? static_cast<float>(static_cast<std::int8_t>(bytes[k])) : static_cast<float>(bytes[k]));
      };
      if (first) {
        Group<Octet>::load_codes<Moment::first>(bytes, check);
      } else {
        Group<Octet>::load_codes<Moment::second>(bytes, check);
      }
    }
  }
}

}  // namespace

int main(int count, char**) {
  on_cpu::error = on_cpu::Error::several_units;  // what a root may be off by, and more
  compare_loads();
  compare_all<Moment::first>(count > 1);
  compare_all<Moment::second>(count > 1);
  std::printf("%ld codes, %ld wrong\n", asked, wrong);
  return wrong == 0 && asked > 10000000 ? 0 : 1;
}
