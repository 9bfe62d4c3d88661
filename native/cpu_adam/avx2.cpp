#include <immintrin.h>

#include "vector.h"

namespace infinity::cpu_adam {
namespace {

struct Avx2 {
  using Reg = __m256;
  static constexpr std::size_t width = 8;

  static Reg all(float value) { return _mm256_set1_ps(value); }
  static Reg sqrt(Reg x) { return _mm256_sqrt_ps(x); }
  static Reg canonical(Reg x) {
    const Reg nan = _mm256_castsi256_ps(_mm256_set1_epi32(kCanonicalNan));
    return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }

  static Reg load(const float* from) { return _mm256_loadu_ps(from); }
  static Reg load_bf16(const std::uint16_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(from)), 16));
  }
  static Reg load_fp16(const std::uint16_t* from) { return _mm256_cvtph_ps(load_halves(from)); }

  static void store(float* to, Reg x) { _mm256_storeu_ps(to, x); }
  static void store_bf16(std::uint16_t* to, Reg x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i high = _mm256_srli_epi32(sum, 16);
    // The pack works within 128-bit halves; its result is in quarters 0 and 2.
    store_halves(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b1000)));
  }
  static void store_fp16(std::uint16_t* to, Reg x) { store_halves(to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

 private:
  static __m128i load_halves(const std::uint16_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static void store_halves(std::uint16_t* to, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x); }
};

}  // namespace

namespace avx2 {

void adam(const Arrays& arrays, std::size_t begin, std::size_t end, const Constants& c) {
  adam_vectors<Avx2>(arrays, begin, end, c);
}

// Serves AVX-512 too: the time goes to the chain of additions into the eight lanes, and wider registers do not shorten it.
double norm_block(const void* values, Dtype dtype, std::size_t begin, std::size_t end) {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  std::size_t i = begin;
  for (; end - i >= 8; i += 8) {
    const __m256 x = load_vector<Avx2>(values, dtype, i);
    const __m256d x_low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), x_high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    low = low + x_low * x_low;
    high = high + x_high * x_high;
  }
  double lanes[8];
  _mm256_storeu_pd(lanes, low);
  _mm256_storeu_pd(lanes + 4, high);
  for (; i < end; ++i) {
    const double x = cpu_adam::load(values, dtype, i);
    lanes[(i - begin) % 8] += x * x;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace avx2
}  // namespace infinity::cpu_adam
