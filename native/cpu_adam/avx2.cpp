#include <immintrin.h>

#include "instruction_set.h"

namespace infinity::cpu_adam {
namespace {

struct Avx2 {
  typedef float Reg __attribute__((vector_size(32)));
  typedef std::uint32_t Bits __attribute__((vector_size(32)));
  typedef std::int32_t Ints __attribute__((vector_size(32)));
  static constexpr std::size_t width = 8;

  static Reg all(float value) { return _mm256_set1_ps(value); }
  static Bits lanes() { return Bits{0, 1, 2, 3, 4, 5, 6, 7}; }
  static Reg sqrt(Reg x) { return _mm256_sqrt_ps(x); }
  static Reg to_float(Ints x) { return _mm256_cvtepi32_ps((__m256i)x); }
  static Ints to_int(Reg x) { return (Ints)_mm256_cvttps_epi32(x); }
  static std::uint32_t max(Bits x) {
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0b01001110));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0b10110001));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(most));
  }

  static Reg load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Reg x) { _mm256_storeu_ps(to, x); }
  static void stream(float* to, Reg x) { _mm256_stream_ps(to, x); }
  static Reg load_fp16(const std::uint16_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
  static Bits to_fp16(Reg x) { return (Bits)_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
  static Bits load_halves(const std::uint16_t* from) {
    return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store_halves(std::uint16_t* to, Bits x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves(x)); }
  static void stream_halves(std::uint16_t* to, Bits x) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), halves(x)); }
  static Bits load_bytes(const std::uint8_t* from) {
    return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static void store_bytes(std::uint8_t* to, Bits x) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves(x), halves(x)));
  }
  static void fence() { _mm_sfence(); }

 private:
  static __m128i halves(Bits x) {
    return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  }
};

}  // namespace

// Serves AVX-512 too: the time goes to the chain of additions into the eight lanes, and wider registers do not shorten it.
double avx2_norm_block(const void* values, Dtype dtype, std::size_t n) {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  std::size_t i = 0;
  for (; n - i >= 8; i += 8) {
    const __m256 x = load_vector<Avx2>(values, dtype, i);
    const __m256d x_low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), x_high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    low = low + x_low * x_low;
    high = high + x_high * x_high;
  }
  double lanes[8];
  _mm256_storeu_pd(lanes, low);
  _mm256_storeu_pd(lanes + 4, high);
  for (; i < n; ++i) {
    const double x = cpu_adam::load(values, dtype, i);
    lanes[i % 8] += x * x;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

const Kernels avx2_kernels = make_kernels<Avx2>(avx2_norm_block);

}  // namespace infinity::cpu_adam
