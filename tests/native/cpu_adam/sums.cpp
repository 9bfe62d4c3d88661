// Is a sum rounded as torch's is (in fp32, then to nearest, ties to even), by every instruction set, for any length, address and number
// of threads?
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu_adam.h"
#include "pool.h"

using namespace infinity::cpu_adam;

namespace {

constexpr std::size_t kPatterns = 1 << 16;
constexpr Isa kIsas[] = {Isa::scalar, Isa::neon, Isa::avx2, Isa::avx512};

std::size_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// What a format with `digits` binary digits and the least exponent `least` has for each of its patterns, and back, from the definition of
// the format and with nothing of convert.h.
struct Half {
  int digits, least;
  std::uint16_t infinity, nan;

  double value(std::uint16_t bits) const {
    const int mantissa = bits & ((1 << (digits - 1)) - 1), exponent = (bits & 0x7fff) >> (digits - 1);
    double size = std::ldexp(mantissa + (exponent ? 1 << (digits - 1) : 0), std::max(exponent, 1) - 1 + least - digits + 1);
    if ((bits & 0x7fff) >= infinity) {
      size = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    }
    return bits >> 15 ? -size : size;
  }

  // To nearest; `tie` says whether two were as near.
  std::uint16_t rounded(float sum, bool& tie) const {
    tie = false;
    if (std::isnan(sum)) return nan;
    const int sign = std::signbit(sum) << 15;
    if (std::isinf(sum)) return static_cast<std::uint16_t>(sign | infinity);
    if (sum == 0) return static_cast<std::uint16_t>(sign);
    const int exponent = std::max(std::ilogb(sum), least);
    const double places = std::ldexp(std::fabs(static_cast<double>(sum)), digits - 1 - exponent), below = std::floor(places);
    const bool odd = std::fmod(below, 2) == 1;
    tie = places - below == 0.5;
    // A carry out of the mantissa is one into the exponent, up to infinity.
    const int size = ((exponent - least) << (digits - 1)) + static_cast<int>(below + (places - below > 0.5 || (tie && odd)));
    return static_cast<std::uint16_t>(sign | std::min<int>(size, infinity));
  }
};

constexpr Half kBf16{8, -126, 0x7f80, 0x7fc0}, kFp16{11, -14, 0x7c00, 0x7e00};

// All patterns of a 16-bit format, each with many others, and how many of the sums were ties.
bool all_patterns(Dtype dtype, const Half& format, Pool& pool) {
  std::vector<double> values(kPatterns);
  for (std::size_t i = 0; i < kPatterns; ++i) values[i] = format.value(static_cast<std::uint16_t>(i));
  std::vector<std::uint16_t> before(kPatterns), source(kPatterns), expected(kPatterns), target;
  std::mt19937 random(1);
  std::size_t ties = 0;
  for (int round = 0; round < 60; ++round) {
    const std::uint32_t factor = random() | 1, shift = random();
    for (std::uint32_t i = 0; i < kPatterns; ++i) {
      before[i] = static_cast<std::uint16_t>(i);
      // Each with any other; then with those of like size, where sums are ties and cancel.
      const std::uint32_t near = i + random() % (9u << (format.digits - 1)) + (shift & 0x8000);
      source[i] = static_cast<std::uint16_t>(round % 2 ? i * factor + shift : near);
      bool tie;
      expected[i] = format.rounded(static_cast<float>(values[before[i]]) + static_cast<float>(values[source[i]]), tie);
      ties += tie;
    }
    for (const Isa isa : kIsas) {
      if (!has_isa(isa)) continue;
      target = before;
      add(target.data(), source.data(), dtype, kPatterns, isa, pool);
      for (std::size_t i = 0; i < kPatterns; ++i) {
        if (target[i] == expected[i]) continue;
        std::printf("dtype %d, instruction set %d: %04x + %04x is %04x, expected %04x\n", static_cast<int>(dtype), static_cast<int>(isa),
                    before[i], source[i], target[i], expected[i]);
        return false;
      }
    }
  }
  if (ties > kPatterns) return true;
  std::printf("dtype %d: only %zu ties\n", static_cast<int>(dtype), ties);
  return false;
}

bool fp32_patterns(Pool& pool) {
  static const std::uint32_t special[] = {0,          0x80000000, 1,          0x807fffff, 0x00800000,
                                          0x7f7fffff, 0x7f800000, 0xff800000, 0x7fa00001, 0xffc00000};
  constexpr std::size_t n = 300'007;
  std::mt19937 random(2);
  std::vector<float> before(n), source(n), expected(n), target;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t a = i % 7 == 0 ? special[random() % 10] : random();
    const std::uint32_t b = i % 5 == 0 ? special[random() % 10] : i % 2 ? random() : a + random() % (1u << 26) + (random() & 0x80000000);
    std::memcpy(&before[i], &a, sizeof a);
    std::memcpy(&source[i], &b, sizeof b);
    expected[i] = before[i] + source[i];
    const std::uint32_t nan = 0x7fc00000;
    if (std::isnan(expected[i])) std::memcpy(&expected[i], &nan, sizeof nan);
  }
  for (const Isa isa : kIsas) {
    if (!has_isa(isa)) continue;
    target = before;
    add(target.data(), source.data(), Dtype::fp32, n, isa, pool);
    if (std::memcmp(target.data(), expected.data(), n * sizeof(float)) == 0) continue;
    std::printf("fp32, instruction set %d: sums DIFFER\n", static_cast<int>(isa));
    return false;
  }
  return true;
}

// Any length from any address: the same bits, and not one byte before or behind them. Vectors end where the data does, so that the address
// sanitizer sees the first byte too many.
bool lengths_and_addresses(Dtype dtype, const std::vector<Pool*>& pools) {
  const std::size_t width = size_of(dtype);
  std::mt19937 random(3);
  for (const std::size_t n : {0, 1, 7, 31, 32, 33, 63, 64, 65, 95, 127, 1000, 32768, 70'001, 150'000}) {
    std::vector<unsigned char> values((n + 3) * width), more((n + 3) * width);
    for (auto& byte : values) byte = static_cast<unsigned char>(random());
    for (auto& byte : more) byte = static_cast<unsigned char>(random());
    for (std::size_t from = 0; from < 4; ++from) {
      const std::size_t to = random() % 4;
      // Whole groups of zeros behind the n elements, at addresses that are multiples of anything.
      const std::size_t padded = (n + kGroup) * width;
      std::vector<unsigned char> sums(padded), others(padded);
      std::copy_n(values.begin() + to * width, n * width, sums.begin());
      std::copy_n(more.begin() + from * width, n * width, others.begin());
      add(sums.data(), others.data(), dtype, (n + kGroup - 1) / kGroup * kGroup, Isa::scalar, *pools[0]);
      auto expected = values;
      std::copy_n(sums.begin(), n * width, expected.begin() + to * width);
      for (const Isa isa : kIsas) {
        for (Pool* const pool : pools) {
          if (!has_isa(isa)) continue;
          auto result = values;
          std::fesetround(FE_UPWARD);  // the caller's rounding mode is not the kernels'
          add(result.data() + to * width, more.data() + from * width, dtype, n, isa, *pool);
          const bool kept = std::fegetround() == FE_UPWARD;
          std::fesetround(FE_TONEAREST);
          if (result == expected && kept) continue;
          std::printf("dtype %d, %zu elements from %zu and %zu, instruction set %d, %d threads: bytes %s, rounding mode %s\n",
                      static_cast<int>(dtype), n, to, from, static_cast<int>(isa), pool->threads(), result == expected ? "equal" : "DIFFER",
                      kept ? "kept" : "LOST");
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  Pool one(1), two(2), three(3), four(4);
  const std::vector<Pool*> pools{&one, &two, &three, &four};
  bool well = all_patterns(Dtype::bf16, kBf16, two) && all_patterns(Dtype::fp16, kFp16, two) && fp32_patterns(two);
  for (const Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) well = well && lengths_and_addresses(dtype, pools);
  return well ? 0 : 1;
}
