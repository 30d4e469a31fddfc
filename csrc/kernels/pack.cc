#include "kernels/pack.h"

#include "kernels/copy.h"

namespace ringtrain {

void pack(size_t element_bytes, const std::vector<Piece>& pieces, void* buffer) {
  char* next = static_cast<char*>(buffer);
  for (const Piece& piece : pieces) {
    const size_t bytes = piece.count * element_bytes;
    copy(next, piece.source, bytes);
    next += bytes;
  }
}

void unpack(size_t element_bytes, const void* buffer, const std::vector<Piece>& pieces) {
  const char* next = static_cast<const char*>(buffer);
  for (const Piece& piece : pieces) {
    const size_t bytes = piece.count * element_bytes;
    copy(piece.destination, next, bytes);
    next += bytes;
  }
}

}  // namespace ringtrain
