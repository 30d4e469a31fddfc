// Tensors: dense and row-major, in the memory of the host or of a GPU.
#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace ringtrain {

using Shape = std::vector<int64_t>;

inline int64_t count_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// The dtype and the shape of a tensor. Travels between ranks.
struct TensorSpec {
  DType dtype = DType::float32;
  Shape shape;

  int64_t count() const { return count_of(shape); }
  size_t bytes() const { return static_cast<size_t>(count()) * size_of(dtype); }
  // Of one index of the first dimension, which there is.
  size_t row_bytes() const {
    return static_cast<size_t>(count_of(Shape(shape.begin() + 1, shape.end()))) * size_of(dtype);
  }
  bool operator==(const TensorSpec& other) const { return dtype == other.dtype && shape == other.shape; }
  bool operator!=(const TensorSpec& other) const { return !(*this == other); }
};

// "float32[64, 32]"
inline std::string to_string(const TensorSpec& spec) {
  std::string text = std::string(name_of(spec.dtype)) + "[";
  for (size_t i = 0; i < spec.shape.size(); ++i) text += (i ? ", " : "") + std::to_string(spec.shape[i]);
  return text + "]";
}

}  // namespace ringtrain
