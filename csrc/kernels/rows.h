// The sum of rows of which some have the same number, such as those of a sparse gradient. Independent of ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/reduce.h"

namespace ringtrain {

// destination[places[i]] = scale * the sum of all source[i] with that place, by the rule of reduce(), in the order of
// i. Rows have `elements` elements. `places` has each of 0 .. sums - 1 at least once. The arrays do not overlap. Throws
// Error(invalid) for another place.
void sum_rows(const Reduction& reduction, void* destination, size_t sums, const void* source, const int64_t* places,
              size_t rows, size_t elements);

}  // namespace ringtrain
