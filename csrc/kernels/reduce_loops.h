// The loops of every variant, written once, over vectors of kWidth bytes.
//
// A variant's file includes this once, after it has defined
//   RINGTRAIN_TARGET                    the attribute that allows the variant's instructions
//   kWidth, Floats                      bytes of a vector, and that many as float32
//   vectors_at_a_time(sources)          an even number, for a sum of so many sources, or of any number if that is 0
//   widen_*, narrow_*                   one Floats from and to 16-bit floats in memory (NaN comes in as the quiet NaN)
// and may define
//   with_one_nan(Floats)                that of this file, in fewer instructions
// Everything is in an anonymous namespace and each function carries the target itself: the linker keeps one copy of an
// inline function, and that copy must never be one that only some CPUs can run.
//
// The rest of a count that fills no vector goes through the same instructions, on a padded copy: so no element knows
// where in an array it was. A NaN result is always the positive quiet NaN, since which operand's NaN survives a sum is
// up to the compiler.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/variant.h"

#define RINGTRAIN_INLINE RINGTRAIN_TARGET __attribute__((always_inline)) static inline

namespace ringtrain {
namespace {

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kWidth)));
  typedef T Anywhere __attribute__((vector_size(kWidth), aligned(1), may_alias));
};

template <class Vector, class T>
RINGTRAIN_INLINE Vector splat(T value) {
  Vector result;
  for (size_t lane = 0; lane < sizeof(Vector) / sizeof(T); ++lane) result[lane] = value;
  return result;
}

// The codecs: how memory holds a dtype (Stored), and in which type it is computed (Number, Vector).

template <class T>
struct Plain {
  using Stored = T;
  using Number = T;
  using Vector = typename VectorOf<T>::Type;

  RINGTRAIN_INLINE Vector load(const T* from) { return *reinterpret_cast<const typename VectorOf<T>::Anywhere*>(from); }
  RINGTRAIN_INLINE void store(T* to, Vector value) { *reinterpret_cast<typename VectorOf<T>::Anywhere*>(to) = value; }
};

struct Boolean : Plain<uint8_t> {
  RINGTRAIN_INLINE Vector load(const uint8_t* from) {
    return reinterpret_cast<Vector>(Plain<uint8_t>::load(from) != Vector{}) & splat<Vector>(uint8_t{1});
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Number = float;
  using Vector = Floats;

  RINGTRAIN_INLINE Vector load(const uint16_t* from) { return widen_float16(from); }
  RINGTRAIN_INLINE void store(uint16_t* to, Vector value) { narrow_float16(to, value); }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Number = float;
  using Vector = Floats;

  RINGTRAIN_INLINE Vector load(const uint16_t* from) { return widen_bfloat16(from); }
  RINGTRAIN_INLINE void store(uint16_t* to, Vector value) { narrow_bfloat16(to, value); }
};

template <class Codec>
constexpr size_t kLanes = kWidth / sizeof(typename Codec::Number);

// Two vectors at a time. Those of bfloat16 hold the elements of even and of odd numbers, which needs no shuffle.

using Pairs = VectorOf<uint32_t>::Type;

template <class Codec>
RINGTRAIN_INLINE void load_two(const typename Codec::Stored* from, typename Codec::Vector* to) {
  if constexpr (std::is_same_v<Codec, BFloat16>) {
    const auto both = *reinterpret_cast<const typename VectorOf<uint32_t>::Anywhere*>(from);
    to[0] = reinterpret_cast<Floats>(both << 16);
    to[1] = reinterpret_cast<Floats>(both & 0xffff0000u);
  } else {
    to[0] = Codec::load(from);
    to[1] = Codec::load(from + kLanes<Codec>);
  }
}

// The bits of a bfloat16 are the high half; the quiet NaN that comes in has no low bits, so rounding leaves it alone.
// Adds 0x7fff, and 1 if the high half is odd, by a subtraction: AVX-512 makes the subtrahend in one instruction.
RINGTRAIN_INLINE Pairs rounded_to_bfloat16(Floats value) {
  const Pairs bits = reinterpret_cast<Pairs>(value);
  return bits - ((~(bits >> 16) & 1u) | 0xffff8000u);
}

template <class Codec>
RINGTRAIN_INLINE void store_two(typename Codec::Stored* to, const typename Codec::Vector* values) {
  if constexpr (std::is_same_v<Codec, BFloat16>) {
    *reinterpret_cast<typename VectorOf<uint32_t>::Anywhere*>(to) =
        (rounded_to_bfloat16(values[0]) >> 16) | (rounded_to_bfloat16(values[1]) & 0xffff0000u);
  } else {
    Codec::store(to, values[0]);
    Codec::store(to + kLanes<Codec>, values[1]);
  }
}

template <class Codec>
RINGTRAIN_INLINE typename Codec::Vector load_some(const typename Codec::Stored* from, size_t count) {
  typename Codec::Stored padded[kLanes<Codec>] = {};
  std::memcpy(padded, from, count * sizeof(*padded));
  return Codec::load(padded);
}

template <class Codec>
RINGTRAIN_INLINE void store_some(typename Codec::Stored* to, typename Codec::Vector value, size_t count) {
  typename Codec::Stored padded[kLanes<Codec>];
  Codec::store(padded, value);
  std::memcpy(to, padded, count * sizeof(*padded));
}

// The operators. A comparison with NaN is false, so min and max have to ask for one in `b`.

#define RINGTRAIN_OPERATOR(Name, combined)                \
  struct Name {                                           \
    template <class Vector>                               \
    RINGTRAIN_INLINE Vector combine(Vector a, Vector b) { \
      return combined;                                    \
    }                                                     \
  };
RINGTRAIN_OPERATOR(Sum, a + b)
RINGTRAIN_OPERATOR(Product, (a * b))
RINGTRAIN_OPERATOR(Min, ((b < a) | (b != b)) ? b : a)
RINGTRAIN_OPERATOR(Max, ((b > a) | (b != b)) ? b : a)
RINGTRAIN_OPERATOR(Or, a | b)
RINGTRAIN_OPERATOR(And, (a & b))

// The value, each NaN in it replaced by the positive quiet one.
template <class Vector>
RINGTRAIN_INLINE Vector with_one_nan(Vector value) {
  using Number = std::decay_t<decltype(value[0])>;
  return (value == value) ? value : splat<Vector>(std::numeric_limits<Number>::quiet_NaN());
}

template <class Codec>
struct Factor {
  using Number = typename Codec::Number;

  typename Codec::Vector factor;
  bool is_one;

  RINGTRAIN_INLINE Factor of(double scale) {
    return {splat<typename Codec::Vector>(static_cast<Number>(scale)), scale == 1.0};
  }

  RINGTRAIN_TARGET __attribute__((always_inline)) inline typename Codec::Vector finish(
      typename Codec::Vector value) const {
    if constexpr (std::is_floating_point_v<Number>) return with_one_nan(is_one ? value : value * factor);
    return value;
  }
};

// `kSources` other than 0 is the number of sources, known to the compiler.
template <class Codec, class Operator, int kSources>
struct Loop {
  using Stored = typename Codec::Stored;
  using Vector = typename Codec::Vector;
  static constexpr size_t kStep = kLanes<Codec>;
  static constexpr int kVectors = vectors_at_a_time(kSources);

  RINGTRAIN_INLINE void combine(const Stored* const* sources, int source_count, size_t i, Vector* results) {
    for (int at = 0; at < kVectors; at += 2) load_two<Codec>(sources[0] + i + at * kStep, results + at);
    for (int source = 1; source < (kSources ? kSources : source_count); ++source) {
      Vector more[kVectors];
      for (int at = 0; at < kVectors; at += 2) load_two<Codec>(sources[source] + i + at * kStep, more + at);
      for (int at = 0; at < kVectors; ++at) results[at] = Operator::combine(results[at], more[at]);
    }
  }

  RINGTRAIN_INLINE Vector combine_some(const Stored* const* sources, int source_count, size_t i, size_t some) {
    Vector result = load_some<Codec>(sources[0] + i, some);
    for (int source = 1; source < source_count; ++source) {
      result = Operator::combine(result, load_some<Codec>(sources[source] + i, some));
    }
    return result;
  }

  RINGTRAIN_TARGET static void run(double scale, const Arrays& arrays) {
    const auto factor = Factor<Codec>::of(scale);
    const Stored* fixed_sources[kSources ? kSources : 1];  // a copy that no store can reach stays in registers
    for (int source = 0; source < kSources; ++source) {
      fixed_sources[source] = static_cast<const Stored*>(arrays.sources[source]);
    }
    const Stored* const* sources = kSources ? fixed_sources : reinterpret_cast<const Stored* const*>(arrays.sources);
    Stored* const* destinations = reinterpret_cast<Stored* const*>(arrays.destinations);
    const int source_count = arrays.source_count, destination_count = arrays.destination_count;
    const size_t count = arrays.count;

    size_t i = 0;
    for (; i + kVectors * kStep <= count; i += kVectors * kStep) {
      Vector results[kVectors];
      combine(sources, source_count, i, results);
      for (Vector& result : results) result = factor.finish(result);
      for (int destination = 0; destination < destination_count; ++destination)
        for (int at = 0; at < kVectors; at += 2)
          store_two<Codec>(destinations[destination] + i + at * kStep, results + at);
    }
    const auto reduce_some = [&](size_t some) RINGTRAIN_TARGET __attribute__((always_inline)) {
      const Vector value = factor.finish(combine_some(sources, source_count, i, some));
      for (int destination = 0; destination < destination_count; ++destination)
        store_some<Codec>(destinations[destination] + i, value, some);
    };
    for (; i + kStep <= count; i += kStep) reduce_some(kStep);  // whole vectors, without a copy
    if (i < count) reduce_some(count - i);
  }
};

// One loop for each number of sources up to 8, and one for any.
template <class Codec, int... kSources>
void sum_floats(double scale, const Arrays& arrays, std::integer_sequence<int, kSources...>) {
  constexpr void (*kLoops[])(double, const Arrays&) = {&Loop<Codec, Sum, kSources>::run...};
  constexpr int kMost = sizeof...(kSources) - 1;
  const int sources = arrays.source_count;
  kLoops[sources <= kMost ? sources : 0](scale, arrays);
}

template <class Codec>
void reduce_floats(const Reduction& reduction, const Arrays& arrays) {
  switch (reduction.reduce) {
    case Reduce::sum:
      return sum_floats<Codec>(reduction.scale, arrays, std::make_integer_sequence<int, 9>());
    case Reduce::product:
      return Loop<Codec, Product, 0>::run(reduction.scale, arrays);
    case Reduce::min:
      return Loop<Codec, Min, 0>::run(reduction.scale, arrays);
    case Reduce::max:
      return Loop<Codec, Max, 0>::run(reduction.scale, arrays);
  }
}

// Sums and products run unsigned, where an overflow is defined to wrap.
template <class T>
void reduce_integers(const Reduction& reduction, const Arrays& arrays) {
  using Wrapping = std::make_unsigned_t<T>;
  switch (reduction.reduce) {
    case Reduce::sum:
      return Loop<Plain<Wrapping>, Sum, 0>::run(1.0, arrays);
    case Reduce::product:
      return Loop<Plain<Wrapping>, Product, 0>::run(1.0, arrays);
    case Reduce::min:
      return Loop<Plain<T>, Min, 0>::run(1.0, arrays);
    case Reduce::max:
      return Loop<Plain<T>, Max, 0>::run(1.0, arrays);
  }
}

void reduce_booleans(const Reduction& reduction, const Arrays& arrays) {
  const bool any = reduction.reduce == Reduce::sum || reduction.reduce == Reduce::max;
  return any ? Loop<Boolean, Or, 0>::run(1.0, arrays) : Loop<Boolean, And, 0>::run(1.0, arrays);
}

void reduce_arrays(const Reduction& reduction, const Arrays& arrays) {
  const auto reduce_them = [&](auto number) { reduce_integers<decltype(number)>(reduction, arrays); };
  if (with_integer(reduction.dtype, reduce_them)) return;
  switch (reduction.dtype) {
    case DType::boolean:
      return reduce_booleans(reduction, arrays);
    case DType::float16:
      return reduce_floats<Float16>(reduction, arrays);
    case DType::bfloat16:
      return reduce_floats<BFloat16>(reduction, arrays);
    case DType::float32:
      return reduce_floats<Plain<float>>(reduction, arrays);
    case DType::float64:
      return reduce_floats<Plain<double>>(reduction, arrays);
    default:
      return;
  }
}

template <class Codec>
RINGTRAIN_TARGET void widen_halves(float* destination, const uint16_t* source, size_t count) {
  constexpr size_t kStep = kLanes<Codec>;
  size_t i = 0;
  for (; i + kStep <= count; i += kStep) Plain<float>::store(destination + i, Codec::load(source + i));
  if (i < count) {
    store_some<Plain<float>>(destination + i, load_some<Codec>(source + i, count - i), count - i);
  }
}

template <class Codec>
RINGTRAIN_TARGET void narrow_halves(double scale, uint16_t* destination, const float* source, size_t count) {
  constexpr size_t kStep = kLanes<Codec>;
  const auto factor = Factor<Codec>::of(scale);
  size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    Codec::store(destination + i, factor.finish(Plain<float>::load(source + i)));
  }
  if (i < count) {
    const Floats rest = load_some<Plain<float>>(source + i, count - i);
    store_some<Codec>(destination + i, factor.finish(rest), count - i);
  }
}

void widen_array(DType dtype, float* destination, const void* source, size_t count) {
  const uint16_t* halves = static_cast<const uint16_t*>(source);
  return dtype == DType::float16 ? widen_halves<Float16>(destination, halves, count)
                                 : widen_halves<BFloat16>(destination, halves, count);
}

void narrow_array(DType dtype, double factor, void* destination, const float* source, size_t count) {
  uint16_t* halves = static_cast<uint16_t*>(destination);
  return dtype == DType::float16 ? narrow_halves<Float16>(factor, halves, source, count)
                                 : narrow_halves<BFloat16>(factor, halves, source, count);
}

}  // namespace
}  // namespace ringtrain
