// What adaptive summation computes on plain memory: the dot products of two vectors, and the vectors as one. Knows no
// rank.
//
// Bit for bit the same on every CPU: the order of the sums is written in the code, and no fused multiply-add is used.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace ringtrain {

// Of vectors a and b, or of a part of them: the dots of all parts add up.
struct Dots {
  double aa = 0, ab = 0, bb = 0;
};

// Of `count` elements of float32 or float64, summed in double.
Dots dots_of(DType dtype, const void* a, const void* b, size_t count);

// a[i] = (1 - ab / 2 aa) a[i] + (1 - ab / 2 bb) b[i], with the dots of the whole vectors; a factor is 1 where its
// vector is nearly zero. Computed in double, since a factor may be beyond the range of float32.
void add_adaptively(DType dtype, const Dots& dots, void* a, const void* b, size_t count);

}  // namespace ringtrain
