#include <immintrin.h>

#include <algorithm>

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

// The eight lanes of a norm block: four in each register.
struct Lanes {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();

  // Four values at a time are converted to double straight from memory: eight, and their halves, took 1.7 times as long on Zen 4.
  template <Dtype dtype>
  INFINITY_INLINE void add_squares(const void* values, std::size_t i) {
    __m128 x, y;
    if constexpr (dtype == Dtype::fp32) {
      const auto* const at = static_cast<const float*>(values) + i;
      x = _mm_loadu_ps(at);
      y = _mm_loadu_ps(at + 4);
    } else {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint16_t*>(values) + i));
      if constexpr (dtype == Dtype::bf16) {  // the upper halves of fp32
        x = _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), halves));
        y = _mm_castsi128_ps(_mm_unpackhi_epi16(_mm_setzero_si128(), halves));
      } else {
        x = _mm_cvtph_ps(halves);
        y = _mm_cvtph_ps(_mm_unpackhi_epi64(halves, halves));
      }
    }
    const __m256d x_wide = _mm256_cvtps_pd(x), y_wide = _mm256_cvtps_pd(y);
    low = low + x_wide * x_wide;
    high = high + y_wide * y_wide;
  }

  void store(double (&lanes)[8]) const {
    _mm256_storeu_pd(lanes, low);
    _mm256_storeu_pd(lanes + 4, high);
  }
};

template <Dtype dtype>
void norm_blocks_of(const void* values, std::size_t n, double* sums) {
  std::size_t begin = 0;
  for (; n - begin >= kNormBlocksAtOnce * kNormBlock; begin += kNormBlocksAtOnce * kNormBlock) {
    Lanes blocks[kNormBlocksAtOnce];
    for (std::size_t i = begin; i < begin + kNormBlock; i += 8) {
      INFINITY_UNROLL for (std::size_t k = 0; k < kNormBlocksAtOnce; ++k) blocks[k].add_squares<dtype>(values, i + k * kNormBlock);
    }
    for (const Lanes& block : blocks) {
      double lanes[8];
      block.store(lanes);
      *sums++ = sum_of(lanes);
    }
  }
  for (; begin < n; begin += kNormBlock) {
    const std::size_t end = std::min(n, begin + kNormBlock), last = end - (end - begin) % 8;
    Lanes block;
    for (std::size_t i = begin; i < last; i += 8) block.add_squares<dtype>(values, i);
    double lanes[8];
    block.store(lanes);
    add_squares(values, dtype, last, end, lanes);
    *sums++ = sum_of(lanes);
  }
}

}  // namespace

void avx2_norm_blocks(const void* values, Dtype dtype, std::size_t n, double* sums) {
  switch (dtype) {
    case Dtype::fp32: return norm_blocks_of<Dtype::fp32>(values, n, sums);
    case Dtype::bf16: return norm_blocks_of<Dtype::bf16>(values, n, sums);
    case Dtype::fp16: return norm_blocks_of<Dtype::fp16>(values, n, sums);
  }
}

const Kernels avx2_kernels = make_kernels<Avx2>(avx2_norm_blocks);

}  // namespace infinity::cpu_adam
