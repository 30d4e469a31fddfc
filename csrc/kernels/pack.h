// Many arrays laid end to end in one buffer, without padding, and back.
#pragma once

#include <cstddef>
#include <vector>

namespace ringtrain {

// Borrowed. pack reads `source`, unpack writes `destination`; the other one may be null.
struct Piece {
  const void* source;
  void* destination;
  size_t count;  // elements
};

void pack(size_t element_bytes, const std::vector<Piece>& pieces, void* buffer);
void unpack(size_t element_bytes, const void* buffer, const std::vector<Piece>& pieces);

}  // namespace ringtrain
