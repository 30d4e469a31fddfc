// The variant for NEON, which every AArch64 has. Its float16 conversions are one instruction each.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#define RINGTRAIN_TARGET

namespace ringtrain {
namespace {

constexpr size_t kWidth = 16;
constexpr int vectors_at_a_time(int sources) { return sources == 0 ? 4 : 2; }
typedef float Floats __attribute__((vector_size(kWidth)));

inline Floats widen_float16(const uint16_t* from) {
  return reinterpret_cast<Floats>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))));
}

inline void narrow_float16(uint16_t* to, Floats value) {
  vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(reinterpret_cast<float32x4_t>(value))));
}

inline Floats widen_bfloat16(const uint16_t* from) { return reinterpret_cast<Floats>(vshll_n_u16(vld1_u16(from), 16)); }

// The quiet NaN that comes in has no low bits, so rounding leaves it alone.
inline void narrow_bfloat16(uint16_t* to, Floats value) {
  const uint32x4_t bits = reinterpret_cast<uint32x4_t>(value);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  vst1_u16(to, vaddhn_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff)));  // the high halves of the sums
}

}  // namespace
}  // namespace ringtrain

#include "kernels/reduce_loops.h"

namespace ringtrain {

const Variant kNeonVariant = {"neon", reduce_arrays, widen_array, narrow_array};

}  // namespace ringtrain

#endif
