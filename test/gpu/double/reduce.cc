#include "reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace gpu_double {
namespace {

template <typename To, typename From>
To same_bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// How a type is in memory, and in what it is computed.
template <typename T>
struct Plain {
  using Stored = T;
  using Computed = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Computed = float;
  static float load(uint16_t bits) { return same_bits<float>(static_cast<uint32_t>(bits) << 16); }
  static uint16_t store(float value) {
    if (std::isnan(value)) return 0x7fc0;
    const auto bits = same_bits<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Computed = float;
  static float load(uint16_t bits) {
    const int exponent = (bits >> 10) & 31;
    const int digits = bits & 1023;
    const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
    if (exponent == 31) return digits != 0 ? NAN : sign * INFINITY;
    return sign * (exponent == 0 ? std::ldexp(digits, -24) : std::ldexp(1024 + digits, exponent - 25));
  }
  static uint16_t store(float value) {
    if (std::isnan(value)) return 0x7e00;
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size == 0.0f) return sign;
    int exponent = 0;
    std::frexp(size, &exponent);
    exponent = std::max(exponent, -13);  // below it are denormals
    // 11 binary digits, the first of which is 0 for denormals; rounding up to 2048 carries into the exponent.
    const auto digits = static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent)));
    return static_cast<uint16_t>(sign | ((exponent + 13) * 1024 + digits));
  }
};

template <typename T>
T combine(Reduction reduction, T left, T right) {
  switch (reduction) {
    case Reduction::product:
      return static_cast<T>(left * right);
    case Reduction::max:
      return std::max(left, right);
    case Reduction::min:
      return std::min(left, right);
    default:
      return static_cast<T>(left + right);
  }
}

// The work of reduce and scale once the type is known.
struct Reducing {
  Reduction reduction;
  const char* const* inputs;
  int ranks;
  size_t count;
  char* out;

  template <typename Element>
  void operator()(Element) const {
    using Stored = typename Element::Stored;
    using Computed = typename Element::Computed;
    for (size_t at = 0; at < count; ++at) {
      Computed value = Element::load(reinterpret_cast<const Stored*>(inputs[0])[at]);
      for (int rank = 1; rank < ranks; ++rank)
        value = combine<Computed>(reduction, value, Element::load(reinterpret_cast<const Stored*>(inputs[rank])[at]));
      if (reduction == Reduction::average) value = static_cast<Computed>(value / static_cast<Computed>(ranks));
      reinterpret_cast<Stored*>(out)[at] = Element::store(value);
    }
  }
};

struct Scaling {
  const void* scalar;
  const char* in;
  size_t count;
  char* out;

  template <typename Element>
  void operator()(Element) const {
    using Stored = typename Element::Stored;
    using Computed = typename Element::Computed;
    const Computed factor = Element::load(*static_cast<const Stored*>(scalar));
    for (size_t at = 0; at < count; ++at) {
      const Computed value = Element::load(reinterpret_cast<const Stored*>(in)[at]);
      reinterpret_cast<Stored*>(out)[at] = Element::store(static_cast<Computed>(value * factor));
    }
  }
};

template <typename Work>
void with(Type type, const Work& work) {
  switch (type) {
    case Type::int8:
      return work(Plain<int8_t>());
    case Type::uint8:
      return work(Plain<uint8_t>());
    case Type::int32:
      return work(Plain<int32_t>());
    case Type::uint32:
      return work(Plain<uint32_t>());
    case Type::int64:
      return work(Plain<int64_t>());
    case Type::uint64:
      return work(Plain<uint64_t>());
    case Type::float16:
      return work(Float16());
    case Type::float32:
      return work(Plain<float>());
    case Type::float64:
      return work(Plain<double>());
    case Type::bfloat16:
      return work(BFloat16());
  }
}

}  // namespace

void reduce(Type type, Reduction reduction, const char* const* inputs, int ranks, size_t count, char* out) {
  with(type, Reducing{reduction, inputs, ranks, count, out});
}

void scale(Type type, const void* scalar, const char* in, size_t count, char* out) {
  with(type, Scaling{scalar, in, count, out});
}

}  // namespace gpu_double
