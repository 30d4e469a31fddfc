// The product of two thin factors, as PowerSGD makes gradients of them. The same bits on every CPU, unlike a product of
// a BLAS, so that ranks on unlike machines keep the same parameters. Independent of ranks.
#pragma once

#include <cstddef>

namespace ringtrain {

// product[i][j] = sum over k of left[k][i] * right[k][j], added in the order of k. All three are row-major, `rank` is
// at least 1, and the product is in other memory than the factors.
void multiply_factors(const float* left, const float* right, float* product, size_t rank, size_t rows, size_t columns);
void multiply_factors(const double* left, const double* right, double* product, size_t rank, size_t rows,
                      size_t columns);

}  // namespace ringtrain
