#include <immintrin.h>

#include "vector.h"

namespace infinity::cpu_adam {
namespace {

struct Avx512 {
  using Reg = __m512;
  static constexpr std::size_t width = 16;

  static Reg all(float value) { return _mm512_set1_ps(value); }
  static Reg sqrt(Reg x) { return _mm512_sqrt_ps(x); }
  static Reg canonical(Reg x) {
    const Reg nan = _mm512_castsi512_ps(_mm512_set1_epi32(kCanonicalNan));
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
  }

  static Reg load(const float* from) { return _mm512_loadu_ps(from); }
  static Reg load_bf16(const std::uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(from)), 16));
  }
  static Reg load_fp16(const std::uint16_t* from) { return _mm512_cvtph_ps(load_halves(from)); }

  static void store(float* to, Reg x) { _mm512_storeu_ps(to, x); }
  static void store_bf16(std::uint16_t* to, Reg x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    store_halves(to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
  }
  static void store_fp16(std::uint16_t* to, Reg x) { store_halves(to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

 private:
  static __m256i load_halves(const std::uint16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void store_halves(std::uint16_t* to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
};

}  // namespace

namespace avx512 {

void adam(const Arrays& arrays, std::size_t begin, std::size_t end, const Constants& c) {
  adam_vectors<Avx512>(arrays, begin, end, c);
}

}  // namespace avx512
}  // namespace infinity::cpu_adam
