// Arithmetic on the rows of matrices, for gradients that are sparse or of low rank. Independent of ranks.
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

// The product of two thin factors, as PowerSGD makes gradients of them. The same bits on every CPU, unlike a product of
// a BLAS, so that ranks on unlike machines keep the same parameters.
//
// product[i][j] = sum over k of left[k][i] * right[k][j], added in the order of k. All three are row-major, `rank` is
// at least 1, and the product is in other memory than the factors.
void multiply_factors(const float* left, const float* right, float* product, size_t rank, size_t rows, size_t columns);
void multiply_factors(const double* left, const double* right, double* product, size_t rank, size_t rows,
                      size_t columns);

}  // namespace ringtrain
