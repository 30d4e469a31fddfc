// The variant for every CPU: the compiler makes what it can of vectors of 16 bytes (SSE2, NEON, or plain registers).
#include <cstdint>
#include <cstring>

#define RINGTRAIN_TARGET

namespace ringtrain {
namespace {

// 16-bit floats, float16 (IEEE binary16) and bfloat16, to float32 and back.
//
// Rounds to nearest even; infinities and denormals keep their value. Only integers and sums of normal numbers are used,
// so a thread that flushes denormals gets the same bits. Widening keeps the payload of a NaN, narrowing makes it the
// one quiet NaN.
//
// There is no branch.

constexpr uint32_t kRebias = (127u - 15u) << 23;          // what the exponents of float32 and float16 differ by
constexpr uint32_t kSmallestNormal = (127u - 14u) << 23;  // 2^-14, the smallest float16 that is not denormal
constexpr uint32_t kTwoTo16 = (127u + 16u) << 23;         // the first power of two beyond float16
constexpr uint32_t kHalf = 126u << 23;                    // 0.5
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kQuiet = 0x00400000u;
constexpr uint32_t kFloat16Infinity = 0x7c00u, kFloat16NaN = 0x7e00u, kBFloat16NaN = 0x7fc0u;

constexpr size_t kWidth = 16;
constexpr int vectors_at_a_time(int sources) { return sources == 0 ? 4 : 2; }
typedef float Floats __attribute__((vector_size(kWidth)));
typedef uint32_t Words __attribute__((vector_size(kWidth)));
typedef uint16_t Halves __attribute__((vector_size(kWidth / 2)));

inline Words bits_of(Floats value) { return reinterpret_cast<Words>(value); }
inline Floats from_bits(Words bits) { return reinterpret_cast<Floats>(bits); }

inline Words load_halves(const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return __builtin_convertvector(halves, Words);
}

inline void store_halves(uint16_t* to, Words value) {
  const Halves halves = __builtin_convertvector(value, Halves);
  std::memcpy(to, &halves, sizeof(halves));
}

// After Fabian Giesen, "float->half variants" (2012).
inline Floats widen_float16(const uint16_t* from) {
  constexpr uint32_t kExponent = 0x1fu << 23;
  const Words half = load_halves(from);
  const Words sign = (half & 0x8000u) << 16;
  const Words bits = (half & 0x7fffu) << 13;
  const Words normal = bits + kRebias;
  // A subtraction of normal numbers normalises what was denormal.
  const Words denormal = bits_of(from_bits(normal + (1u << 23)) - from_bits(Words{} + kSmallestNormal));
  const Words infinite = normal + kRebias;
  const Words special = infinite > kInfinity ? infinite | kQuiet : infinite;
  const Words finite = bits < (1u << 23) ? denormal : normal;
  return from_bits(sign | (bits < kExponent ? finite : special));
}

inline void narrow_float16(uint16_t* to, Floats value) {
  const Words sign = (bits_of(value) >> 16) & 0x8000u;
  const Words bits = bits_of(value) & 0x7fffffffu;
  // The last bit of a float32 between 0.5 and 1 weighs 2^-24, as that of a denormal float16 does.
  const Words denormal = bits_of(from_bits(bits) + 0.5f) - kHalf;
  const Words normal = (bits - kRebias + 0xfffu + ((bits >> 13) & 1u)) >> 13;  // carries into infinity where it should
  const Words finite = sign | (bits < kSmallestNormal ? denormal : normal);
  const Words special = bits > kInfinity ? Words{} + kFloat16NaN : sign | kFloat16Infinity;
  store_halves(to, bits < kTwoTo16 ? finite : special);
}

inline Floats widen_bfloat16(const uint16_t* from) { return from_bits(load_halves(from) << 16); }

inline void narrow_bfloat16(uint16_t* to, Floats value) {
  const Words bits = bits_of(value);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  store_halves(to, (bits & 0x7fffffffu) > kInfinity ? Words{} + kBFloat16NaN : rounded);
}

}  // namespace
}  // namespace ringtrain

#include "kernels/reduce_loops.h"

namespace ringtrain {

const Variant kScalarVariant = {"scalar", reduce_arrays, widen_array, narrow_array};

}  // namespace ringtrain
