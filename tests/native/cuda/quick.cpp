// Are the quick roots and quotients of octet.h rounded correctly: all roots, and the quotients that lie nearest to where rounding changes?
#include "cuda_runtime.h"

#include <cstdio>
#include <random>

#include "../../../native/cuda/device.h"
#include "../../../native/cuda/octet.h"

using namespace infinity::cpu_adam;

namespace {

long asked = 0, wrong = 0;

void compare(const char* what, float x, float y, float expected, float result) {
  ++asked;
  if (to_bits(expected) == to_bits(result)) return;
  if (++wrong < 10) std::printf("%s of %a and %a: %a instead of %a\n", what, x, y, result, expected);
}

void compare_quotients(float x, float y) {
  compare("the quotient", x, y, x / y, Quick<Octet>::quotient(x, y));
  compare("the quotient by a constant", x, y, x / y, Quick<Octet>::quotient(x, y, 1 / y));
}

// Every mantissa below an even and an odd power of two, at the ends of the range and in the middle.
void compare_roots() {
  for (const float least : {0x1p-96f, 1.0f, 0x1p30f}) {
    for (std::uint32_t bits = to_bits(least); bits < to_bits(4 * least); ++bits) {
      compare("the root", from_bits(bits), 0, std::sqrt(from_bits(bits)), Quick<Octet>::root(from_bits(bits)));
    }
  }
}

// X / Y with 24 bits each is nearest to a midpoint M / 2^places, M odd with 25 bits, where X 2^places - M Y is a small odd k: M is -k / Y in
// arithmetic modulo 2^places.
void compare_nearest(std::uint32_t y, int places, std::int64_t k) {
  std::uint64_t inverse = y;  // right in its last three bits
  for (int i = 0; i < 4; ++i) inverse *= 2 - y * inverse;
  std::uint64_t m = static_cast<std::uint64_t>(-k) * inverse % (std::uint64_t{1} << places);
  if (places == 24) m |= 1 << 24;
  const std::int64_t product = static_cast<std::int64_t>(m * y) + k;
  const std::int64_t x = product >> places;
  if (m >> 24 != 1 || x >> 23 != 1) return;
  compare_quotients(static_cast<float>(x), static_cast<float>(y));
  compare_quotients(-0x1p-87f * static_cast<float>(x), 0x1p9f * static_cast<float>(y));   // the least numerator, the greatest divisor
  compare_quotients(0x1p40f * static_cast<float>(x), 0x1p-72f * static_cast<float>(y));  // the greatest and the least
}

}  // namespace

int main() {
  compare_roots();
  for (std::uint32_t y = (1 << 23) + 1; y < 1 << 24; y += y < (1 << 24) - 20000 ? 86 : 2) {
    for (std::int64_t k = -9; k <= 9; k += 2) compare_nearest(y, 24, k), compare_nearest(y, 25, k);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 4000000; ++i) {
    const float x = from_bits(to_bits(0x1p-64f) + random() % (128u << 23)), y = from_bits(to_bits(0x1p-49f) + random() % (82u << 23));
    compare_quotients(i % 2 ? x : -x, y);
    compare_quotients(from_bits(to_bits(1.0f) | (random() >> 9)), from_bits(to_bits(2.0f) - 1 - random() % 64));
  }
  std::printf("%ld roots and quotients, %ld wrong\n", asked, wrong);
  return wrong == 0 && asked > 20000000 ? 0 : 1;
}
