// Many arrays laid end to end in one buffer, without padding, and back.
#pragma once

#include <cstddef>
#include <vector>

#include "base/dtype.h"

namespace ringtrain {

// Borrowed. pack reads `source`, unpack writes `destination`; the other one may be null.
struct Piece {
  const void* source;
  void* destination;
  size_t count;  // elements
};

// Each element is multiplied by `factor` on the way, rounded as in reduce.h; a factor of 1 and bool are copied.
void pack(DType dtype, double factor, const std::vector<Piece>& pieces, void* buffer);
void unpack(DType dtype, double factor, const void* buffer, const std::vector<Piece>& pieces);

// The same for 16-bit floats, with a buffer of float32.
void widen_pack(DType dtype, double factor, const std::vector<Piece>& pieces, float* buffer);
void narrow_unpack(DType dtype, double factor, const float* buffer, const std::vector<Piece>& pieces);

}  // namespace ringtrain
