// Element-wise reduction of several arrays into one, on plain memory. Independent of ranks.
//
// Bit for bit the same on every CPU: each element is combined in the order of `sources`, 16-bit floats accumulate in
// float32 and are rounded once (to nearest even), no fused multiply-add is used, and a NaN result is the positive quiet
// NaN. The variants for scalar, AVX2, AVX-512 and NEON are chosen once, at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.h"

namespace ringtrain {

struct Reduction {
  DType dtype = DType::float32;
  Reduce reduce = Reduce::sum;
  // Multiplies the result: floats up to 32 bits in float32, float64 in double, integers in double, truncated towards
  // zero and held at the limits of their type; 1/n divides integers by n, exactly. Ignored for bool.
  double scale = 1.0;
};

// destinations[*][i] = scale * (sources[0][i] op sources[1][i] op ...), for i < count.
// A destination may be one of the sources (same address); otherwise they do not overlap. Any alignment.
// bool: sum and max are "or", product and min are "and"; any non-zero byte is true, the result is 0 or 1.
// min and max of floats: NaN if any operand is NaN. Integer overflow wraps.
void reduce(const Reduction& reduction, void* const* destinations, int destination_count, const void* const* sources,
            int source_count, size_t count);

// destination[i] = source[i] * factor, rounded as above; a factor of 1 copies, NaN and all. May be in place.
void scale(DType dtype, double factor, void* destination, const void* source, size_t count);

// 16-bit floats to float32 and back (times factor, rounded to nearest even).
void widen(DType dtype, float* destination, const void* source, size_t count);
void narrow(DType dtype, double factor, void* destination, const float* source, size_t count);

// Converts between 16-bit floats and float32, or copies. Throws Error(invalid) for other pairs.
void convert(const void* source, DType from, void* destination, DType to, size_t count);

// "auto", "scalar", "avx2", "avx512" or "neon". Throws Error(invalid) if this CPU cannot. Call before the first
// reduction.
void choose_simd(const std::string& name);

// As long as it lives, its thread computes with denormal numbers. Libraries built with -ffast-math have them flushed to
// zero just by being loaded, and ranks that differ in that would end with different bits.
class KeptDenormals {
 public:
  KeptDenormals();
  ~KeptDenormals();
  KeptDenormals(const KeptDenormals&) = delete;
  KeptDenormals& operator=(const KeptDenormals&) = delete;

 private:
  uint64_t before_ = 0;  // the control register of floating point
};

// The variant in use: "scalar", "avx2", "avx512" or "neon".
const char* simd_in_use();

// The dot products of adaptive summation: of vectors a and b, or of a part of them; the dots of all parts
// add up. The order of the sums is written in the code, so they are the same on every CPU.
struct Dots {
  double aa = 0, ab = 0, bb = 0;
};

// Of `count` elements of float32 or float64, summed in double.
Dots dots_of(DType dtype, const void* a, const void* b, size_t count);

// a[i] = (1 - ab / 2 aa) a[i] + (1 - ab / 2 bb) b[i], with the dots of the whole vectors; a factor is 1 where its
// vector is nearly zero. Computed in double, since a factor may be beyond the range of float32.
void add_adaptively(DType dtype, const Dots& dots, void* a, const void* b, size_t count);

}  // namespace ringtrain
