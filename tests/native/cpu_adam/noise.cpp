// Are the bits of stochastic rounding random enough: even in every value, independent between neighbours, keys, and the two halves?
// Everything is drawn from fixed keys, so the answer is the same every time; bounds are five standard deviations.
#include "noise.h"

#include <cmath>
#include <cstdio>
#include <vector>

using namespace infinity::cpu_adam;

namespace {

constexpr std::size_t kDraws = 1 << 20;
int failures = 0;

void check(double deviations, const char* what, unsigned long key) {
  if (std::fabs(deviations) < 5) return;
  std::printf("key %lu: %s is off by %.1f standard deviations\n", key, what, deviations);
  ++failures;
}

std::vector<std::uint32_t> draws(std::uint64_t key, std::uint64_t first, std::size_t n, std::size_t stride = 1) {
  std::vector<std::uint32_t> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t number = first + i * stride;
    values[i] = noise_of(make_noise(key, number), static_cast<std::uint32_t>(number));
  }
  return values;
}

double half(std::uint32_t value, int which) { return ((which ? value >> 16 : value & 0xffff) + 0.5) / 65536 - 0.5; }

// The correlation of half `a` of x with half `b` of y, in standard deviations.
double correlation(const std::vector<std::uint32_t>& x, const std::vector<std::uint32_t>& y, int a, int b) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += half(x[i], a) * half(y[i], b);
  return sum * 12 / std::sqrt(static_cast<double>(x.size()));
}

// chi-square of 256 bins of the top byte of a half, in standard deviations.
double evenness(const std::vector<std::uint32_t>& x, int which) {
  std::vector<double> counts(256);
  for (const std::uint32_t value : x) ++counts[(which ? value >> 24 : value >> 8) & 255];
  const double expected = static_cast<double>(x.size()) / 256;
  double sum = 0;
  for (const double count : counts) sum += (count - expected) * (count - expected) / expected;
  return (sum - 255) / std::sqrt(2 * 255.0);
}

}  // namespace

int main() {
  for (const std::uint64_t key : {0ull, 1ull, 2ull, 77ull, 1ull << 32, 0xdeadbeefcafef00dull}) {
    const std::uint64_t start = key == 77 ? (1ull << 32) - kDraws / 2 : 0;  // over the border where the upper half changes
    const auto here = draws(key, start, kDraws);
    for (int which = 0; which < 2; ++which) {
      double sum = 0;
      for (const std::uint32_t value : here) sum += half(value, which);
      check(sum * std::sqrt(12.0 / kDraws), "the mean", key);
      check(evenness(here, which), "evenness", key);
      for (const std::size_t stride : {32, 4096}) check(evenness(draws(key, start, kDraws, stride), which), "evenness in strides", key);
      for (const std::size_t apart : {1, 2, 16, 32, 4096}) {
        for (int other = 0; other < 2; ++other) {
          check(correlation(here, draws(key, start + apart, kDraws), which, other), "the correlation of neighbours", key);
        }
      }
      for (const std::uint64_t step : {1, 2, 3, 1000}) {
        for (int other = 0; other < 2; ++other) {
          check(correlation(here, draws(key + step, start, kDraws), which, other), "the correlation of steps", key);
        }
      }
      check(correlation(here, draws(key, start + (1ull << 32), kDraws), which, which), "the correlation over 2^32 elements", key);
    }
    check(correlation(here, here, 0, 1), "the correlation of the halves", key);
    for (int bit = 0; bit < 32; ++bit) {
      double ones = 0;
      for (const std::uint32_t value : here) ones += value >> bit & 1;
      check((2 * ones - kDraws) / std::sqrt(static_cast<double>(kDraws)), "a bit", key);
    }
  }
  // One element over many steps, as an EMA sees it: even, and no memory of the step before.
  std::vector<std::uint32_t> steps(kDraws), next(kDraws);
  for (std::size_t step = 0; step < kDraws; ++step) steps[step] = noise_of(make_noise(step, 12345), 12345u);
  for (std::size_t step = 0; step < kDraws; ++step) next[step] = noise_of(make_noise(step + 1, 12345), 12345u);
  for (int which = 0; which < 2; ++which) {
    check(evenness(steps, which), "evenness over steps", 0);
    check(correlation(steps, next, which, which), "the correlation of an element's steps", 0);
  }
  return failures == 0 ? 0 : 1;
}
