// Arithmetic of the collectives. 16-bit floats are computed in float32 and rounded to nearest even once, at the end.
#pragma once

#include <cstddef>

namespace gpu_double {

// Numbered as NCCL does.
enum class Type {
  int8,
  uint8,
  int32,
  uint32,
  int64,
  uint64,
  float16,
  float32,
  float64,
  bfloat16,
};
constexpr int kTypes = 10;

enum class Reduction { sum, product, max, min, average };

constexpr size_t size_of(Type type) {
  constexpr size_t kBytes[kTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kBytes[static_cast<int>(type)];
}

// One value of each of `ranks` inputs makes one of `out`, in the order of the ranks. Averages of integers are cut off.
void reduce(Type type, Reduction reduction, const char* const* inputs, int ranks, size_t count, char* out);

// `out` = `in` * `*scalar`, rounded to the type.
void scale(Type type, const void* scalar, const char* in, size_t count, char* out);

}  // namespace gpu_double
