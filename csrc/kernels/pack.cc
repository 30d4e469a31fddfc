#include "kernels/pack.h"

#include "kernels/reduce.h"

namespace ringtrain {

void pack(DType dtype, double factor, const std::vector<Piece>& pieces, void* buffer) {
  char* next = static_cast<char*>(buffer);
  for (const Piece& piece : pieces) {
    scale(dtype, factor, next, piece.source, piece.count);
    next += piece.count * size_of(dtype);
  }
}

void unpack(DType dtype, double factor, const void* buffer, const std::vector<Piece>& pieces) {
  const char* next = static_cast<const char*>(buffer);
  for (const Piece& piece : pieces) {
    scale(dtype, factor, piece.destination, next, piece.count);
    next += piece.count * size_of(dtype);
  }
}

void widen_pack(DType dtype, double factor, const std::vector<Piece>& pieces, float* buffer) {
  for (const Piece& piece : pieces) {
    widen(dtype, buffer, piece.source, piece.count);
    scale(DType::float32, factor, buffer, buffer, piece.count);
    buffer += piece.count;
  }
}

void narrow_unpack(DType dtype, double factor, const float* buffer, const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) {
    narrow(dtype, factor, piece.destination, buffer, piece.count);
    buffer += piece.count;
  }
}

}  // namespace ringtrain
