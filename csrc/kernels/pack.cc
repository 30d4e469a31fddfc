#include "kernels/pack.h"

#include <cstring>

namespace ringtrain {

void pack(size_t element_bytes, const std::vector<Piece>& pieces, void* buffer) {
  char* next = static_cast<char*>(buffer);
  for (const Piece& piece : pieces) {
    const size_t bytes = piece.count * element_bytes;
    if (bytes > 0) std::memcpy(next, piece.source, bytes);
    next += bytes;
  }
}

void unpack(size_t element_bytes, const void* buffer, const std::vector<Piece>& pieces) {
  const char* next = static_cast<const char*>(buffer);
  for (const Piece& piece : pieces) {
    const size_t bytes = piece.count * element_bytes;
    if (bytes > 0) std::memcpy(piece.destination, next, bytes);
    next += bytes;
  }
}

}  // namespace ringtrain
