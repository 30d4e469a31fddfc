#include "kernels/factors.h"

#include <algorithm>

namespace ringtrain {

namespace {

constexpr size_t kColumnsAtATime = 1024;  // so that these, of all rows of the right factor, stay in the cache

template <typename T>
void multiply(const T* left, const T* right, T* __restrict product, size_t rank, size_t rows, size_t columns) {
  for (size_t first = 0; first < columns; first += kColumnsAtATime) {
    size_t count = std::min(kColumnsAtATime, columns - first);
    for (size_t row = 0; row < rows; ++row) {
      T* __restrict out = product + row * columns + first;
      const T of_row = left[row];
      const T* first_right = right + first;
      for (size_t j = 0; j < count; ++j) out[j] = of_row * first_right[j];
      for (size_t k = 1; k < rank; ++k) {
        const T factor = left[k * rows + row];
        const T* other = right + k * columns + first;
        for (size_t j = 0; j < count; ++j) out[j] += factor * other[j];
      }
    }
  }
}

}  // namespace

void multiply_factors(const float* left, const float* right, float* product, size_t rank, size_t rows, size_t columns) {
  multiply(left, right, product, rank, rows, columns);
}

void multiply_factors(const double* left, const double* right, double* product, size_t rank, size_t rows,
                      size_t columns) {
  multiply(left, right, product, rank, rows, columns);
}

}  // namespace ringtrain
