#include "collectives/network/packing.h"

namespace ringtrain {

void reduce_packed(const std::vector<Piece>& pieces, size_t element_bytes, Scratch& packed,
                   const std::function<void(const std::vector<Piece>&)>& reduce) {
  constexpr size_t kLargeBytes = 1 << 20;  // from here on packing costs more than another operation
  std::vector<Piece> arrays, small;
  size_t small_count = 0;
  for (const Piece& piece : pieces) {
    if (piece.count == 0) continue;
    const bool is_large = piece.count * element_bytes >= kLargeBytes;
    (is_large ? arrays : small).push_back(piece);
    if (!is_large) small_count += piece.count;
  }
  if (small.size() == 1) arrays.push_back(small.front());
  if (small.size() <= 1) {
    if (!arrays.empty()) reduce(arrays);
    return;
  }
  char* buffer = packed.get(small_count * element_bytes);
  pack(element_bytes, small, buffer);
  arrays.push_back({buffer, buffer, small_count});
  reduce(arrays);
  unpack(element_bytes, buffer, small);
}

}  // namespace ringtrain
