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
// The templates have no branch, and work on vectors: Bits of uint32_t, Value of float.
template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

namespace half {

constexpr uint32_t kRebias = (127u - 15u) << 23;          // what the exponents of float32 and float16 differ by
constexpr uint32_t kSmallestNormal = (127u - 14u) << 23;  // 2^-14, the smallest float16 that is not denormal
constexpr uint32_t kTwoTo16 = (127u + 16u) << 23;         // the first power of two beyond float16
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kQuiet = 0x00400000u;
constexpr uint32_t kFloat16Infinity = 0x7c00u, kFloat16NaN = 0x7e00u, kBFloat16NaN = 0x7fc0u;

// After Fabian Giesen, "float->half variants" (2012).
template <class Value, class Bits>
inline Value widen_float16(Bits half) {
  constexpr uint32_t kExponent = 0x1fu << 23;
  const Bits sign = (half & 0x8000u) << 16;
  const Bits bits = (half & 0x7fffu) << 13;
  const Bits normal = bits + kRebias;
  // A subtraction of normal numbers normalises what was denormal.
  const Bits denormal =
      same_bits<Bits>(same_bits<Value>(normal + (1u << 23)) - same_bits<Value>(Bits{} + kSmallestNormal));
  const Bits infinite = normal + kRebias;
  const Bits special = infinite > kInfinity ? infinite | kQuiet : infinite;
  const Bits finite = bits < (1u << 23) ? denormal : normal;
  return same_bits<Value>(sign | (bits < kExponent ? finite : special));
}

template <class Bits, class Value>
inline Bits narrow_float16(Value value) {
  const Bits signed_bits = same_bits<Bits>(value);
  const Bits sign = (signed_bits >> 16) & 0x8000u;
  const Bits bits = signed_bits & 0x7fffffffu;
  // The last bit of a float32 between 0.5 and 1 weighs 2^-24, as that of a denormal float16 does.
  const Bits denormal = same_bits<Bits>(same_bits<Value>(bits) + 0.5f) - same_bits<uint32_t>(0.5f);
  const Bits normal = (bits - kRebias + 0xfffu + ((bits >> 13) & 1u)) >> 13;  // carries into infinity where it should
  const Bits finite = sign | (bits < kSmallestNormal ? denormal : normal);
  const Bits special = bits > kInfinity ? Bits{} + kFloat16NaN : sign | kFloat16Infinity;
  return bits < kTwoTo16 ? finite : special;
}

template <class Value, class Bits>
inline Value widen_bfloat16(Bits half) {
  return same_bits<Value>(half << 16);
}

template <class Bits, class Value>
inline Bits narrow_bfloat16(Value value) {
  const Bits bits = same_bits<Bits>(value);
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > kInfinity ? Bits{} + kBFloat16NaN : rounded;
}

}  // namespace half

constexpr size_t kWidth = 16;
constexpr int vectors_at_a_time(int sources) { return sources == 0 ? 4 : 2; }
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
