// The variant for every CPU: the compiler makes what it can of vectors of 16 bytes (SSE2, NEON, or plain registers).
#include <cstdint>
#include <cstring>

#include "kernels/half.h"

#define RINGTRAIN_TARGET

namespace ringtrain {
namespace {

constexpr size_t kWidth = 16;
typedef float Floats __attribute__((vector_size(kWidth)));
typedef uint32_t Words __attribute__((vector_size(kWidth)));
typedef uint16_t Halves __attribute__((vector_size(kWidth / 2)));

inline Words load_halves(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return __builtin_convertvector(halves, Words);
}

inline void store_halves(uint16_t* to, Words value) {
  const Halves halves = __builtin_convertvector(value, Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

inline Floats widen_float16(const uint16_t* from) { return half::widen_float16<Floats>(load_halves(from)); }
inline void narrow_float16(uint16_t* to, Floats value) { store_halves(to, half::narrow_float16<Words>(value)); }
inline Floats widen_bfloat16(const uint16_t* from) { return half::widen_bfloat16<Floats>(load_halves(from)); }
inline void narrow_bfloat16(uint16_t* to, Floats value) { store_halves(to, half::narrow_bfloat16<Words>(value)); }

}  // namespace
}  // namespace ringtrain

#include "kernels/reduce_loops.h"

namespace ringtrain {

const Variant kScalarVariant = {"scalar", reduce_arrays, widen_array, narrow_array};

}  // namespace ringtrain
