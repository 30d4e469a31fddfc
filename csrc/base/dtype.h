// The element types that ringtrain carries, and what one can ask of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringtrain {

// Integers come before floats.
enum class DType : uint8_t {
  boolean,
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  uint64,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
};
constexpr int kDTypes = 13;

// How the values of all ranks become one. An average is a sum with a scale.
enum class Reduce : uint8_t { sum, min, max, product };

constexpr size_t size_of(DType dtype) {
  constexpr size_t kBytes[kDTypes] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
  return kBytes[static_cast<size_t>(dtype)];
}

constexpr const char* name_of(DType dtype) {
  constexpr const char* kNames[kDTypes] = {"bool",   "uint8", "int8",    "uint16",   "int16",   "uint32", "int32",
                                           "uint64", "int64", "float16", "bfloat16", "float32", "float64"};
  return kNames[static_cast<size_t>(dtype)];
}

constexpr const char* name_of(Reduce reduce) {
  constexpr const char* kNames[] = {"sum", "min", "max", "product"};
  return kNames[static_cast<size_t>(reduce)];
}

constexpr bool is_half(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }
// In what dtype values are summed and updated: 16-bit floats would be rounded each time, or overflow.
constexpr DType wide(DType dtype) { return is_half(dtype) ? DType::float32 : dtype; }

constexpr bool is_unsigned(DType dtype) {
  return dtype == DType::uint8 || dtype == DType::uint16 || dtype == DType::uint32 || dtype == DType::uint64;
}

constexpr bool is_float(DType dtype) { return dtype >= DType::float16; }

}  // namespace ringtrain
