// The variant for AVX-512 F, BW, DQ and VL. Not BF16, whose conversion flushes denormals.
#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC 12's own immintrin.h (its bug 105593)
#endif

#include <immintrin.h>

#include <cstdint>

// Some versions of clang count the registers of 512 bits as a feature of its own, which others do not know.
#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ <= 21
#define RINGTRAIN_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,evex512")))
#else
#define RINGTRAIN_TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#endif

namespace ringtrain {
namespace {

constexpr size_t kWidth = 64;
constexpr int vectors_at_a_time(int) { return 4; }
typedef float Floats __attribute__((vector_size(kWidth)));

RINGTRAIN_TARGET inline __m256i load_halves(const uint16_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

RINGTRAIN_TARGET inline Floats widen_float16(const uint16_t* from) { return _mm512_cvtph_ps(load_halves(from)); }

RINGTRAIN_TARGET inline void narrow_float16(uint16_t* to, Floats value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

RINGTRAIN_TARGET inline Floats widen_bfloat16(const uint16_t* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(from)), 16));
}

// The quiet NaN that comes in has no low bits, so rounding leaves it alone.
RINGTRAIN_TARGET inline void narrow_bfloat16(uint16_t* to, Floats value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(rounded));
}

// The table has a digit for each kind of number, quiet and signalling NaN last: 1 takes the value, 0 the first operand.
RINGTRAIN_TARGET __attribute__((always_inline)) inline Floats with_one_nan(Floats value) {
  return _mm512_fixupimm_ps(_mm512_set1_ps(__builtin_nanf("")), value, _mm512_set1_epi32(0x11111100), 0);
}

}  // namespace
}  // namespace ringtrain

#include "kernels/reduce_loops.h"

namespace ringtrain {

const Variant kAvx512Variant = {"avx512", reduce_arrays, widen_array, narrow_array};

}  // namespace ringtrain

#endif
