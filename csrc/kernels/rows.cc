#include "kernels/rows.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"

namespace ringtrain {
namespace {

// Where the sources of each sum begin in a list of all rows ordered by sum.
std::vector<size_t> beginnings(const int64_t* places, size_t rows, size_t sums) {
  std::vector<size_t> begins(sums + 1);
  for (size_t i = 0; i < rows; ++i) {
    if (places[i] < 0 || static_cast<uint64_t>(places[i]) >= sums)
      throw invalid("there are " + std::to_string(sums) + " sums, not one with the number " +
                    std::to_string(places[i]));
    ++begins[static_cast<size_t>(places[i]) + 1];
  }
  for (size_t sum = 0; sum < sums; ++sum) {
    if (begins[sum + 1] == 0) throw invalid("sum " + std::to_string(sum) + " has no rows");
    begins[sum + 1] += begins[sum];
  }
  return begins;
}

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

void sum_rows(const Reduction& reduction, void* destination, size_t sums, const void* source, const int64_t* places,
              size_t rows, size_t elements) {
  const std::vector<size_t> begins = beginnings(places, rows, sums);
  const size_t bytes = elements * size_of(reduction.dtype);
  std::vector<const void*> sources(rows);
  std::vector<size_t> ends(begins.begin(), begins.end() - 1);
  for (size_t i = 0; i < rows; ++i)
    sources[ends[static_cast<size_t>(places[i])]++] = static_cast<const char*>(source) + i * bytes;
  for (size_t sum = 0; sum < sums; ++sum) {
    void* const place = static_cast<char*>(destination) + sum * bytes;
    reduce(reduction, &place, 1, sources.data() + begins[sum], static_cast<int>(begins[sum + 1] - begins[sum]),
           elements);
  }
}

void multiply_factors(const float* left, const float* right, float* product, size_t rank, size_t rows, size_t columns) {
  multiply(left, right, product, rank, rows, columns);
}

void multiply_factors(const double* left, const double* right, double* product, size_t rank, size_t rows,
                      size_t columns) {
  multiply(left, right, product, rank, rows, columns);
}

}  // namespace ringtrain
