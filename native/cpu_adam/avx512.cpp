#include <immintrin.h>

#include "instruction_set.h"

namespace infinity::cpu_adam {
namespace {

struct Avx512 {
  typedef float Reg __attribute__((vector_size(64)));
  typedef std::uint32_t Bits __attribute__((vector_size(64)));
  typedef std::int32_t Ints __attribute__((vector_size(64)));
  static constexpr std::size_t width = 16;

  static Reg all(float value) { return _mm512_set1_ps(value); }
  static Bits lanes() { return Bits{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
  static Reg sqrt(Reg x) { return _mm512_sqrt_ps(x); }
  static Reg to_float(Ints x) { return _mm512_cvtepi32_ps((__m512i)x); }
  static Ints to_int(Reg x) { return (Ints)_mm512_cvttps_epi32(x); }
  static std::uint32_t max(Bits x) { return _mm512_reduce_max_epu32((__m512i)x); }

  static Reg load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Reg x) { _mm512_storeu_ps(to, x); }
  static void stream(float* to, Reg x) { _mm512_stream_ps(to, x); }
  static Reg load_fp16(const std::uint16_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
  static Bits to_fp16(Reg x) { return (Bits)_mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
  static Bits load_halves(const std::uint16_t* from) {
    return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store_halves(std::uint16_t* to, Bits x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves(x)); }
  static void stream_halves(std::uint16_t* to, Bits x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), halves(x)); }
  static Bits load_bytes(const std::uint8_t* from) {
    return (Bits)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store_bytes(std::uint8_t* to, Bits x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)x)); }
  static void fence() { _mm_sfence(); }

 private:
  static __m256i halves(Bits x) { return _mm512_cvtepi32_epi16((__m512i)x); }
};

}  // namespace

const Kernels avx512_kernels = make_kernels<Avx512>(avx2_norm_blocks);

}  // namespace infinity::cpu_adam
