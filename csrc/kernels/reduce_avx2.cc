// The variant for AVX2 and F16C: any x86-64 since 2013.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstdint>

#define RINGTRAIN_TARGET __attribute__((target("avx2,f16c")))

namespace ringtrain {
namespace {

constexpr size_t kWidth = 32;
constexpr int vectors_at_a_time(int sources) { return sources > 4 ? 2 : 4; }  // there are 16 registers
typedef float Floats __attribute__((vector_size(kWidth)));

RINGTRAIN_TARGET inline __m128i load_halves(const uint16_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

RINGTRAIN_TARGET inline Floats widen_float16(const uint16_t* from) { return _mm256_cvtph_ps(load_halves(from)); }

RINGTRAIN_TARGET inline void narrow_float16(uint16_t* to, Floats value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

RINGTRAIN_TARGET inline Floats widen_bfloat16(const uint16_t* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(from)), 16));
}

// The quiet NaN that comes in has no low bits, so rounding leaves it alone.
RINGTRAIN_TARGET inline void narrow_bfloat16(uint16_t* to, Floats value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}

}  // namespace
}  // namespace ringtrain

#include "kernels/reduce_loops.h"

namespace ringtrain {

const Variant kAvx2Variant = {"avx2", reduce_arrays, widen_array, narrow_array};

}  // namespace ringtrain

#endif
