#include "collectives/network/flat_group.h"

namespace ringtrain {

void FlatGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  constexpr size_t kLargeBytes = 1 << 20;  // from here on packing costs more than another operation
  const size_t element = size_of(reduction.dtype);
  std::vector<Piece> arrays, small;
  size_t small_count = 0;
  for (const Piece& piece : pieces) {
    if (piece.count == 0) continue;
    const bool is_large = piece.count * element >= kLargeBytes;
    (is_large ? arrays : small).push_back(piece);
    if (!is_large) small_count += piece.count;
  }
  if (small.size() == 1) arrays.push_back(small.front());
  if (small.size() <= 1) {
    if (!arrays.empty()) reduce_arrays(reduction, arrays);
    return;
  }
  char* buffer = packed_.get(small_count * element);
  pack(element, small, buffer);
  arrays.push_back({buffer, buffer, small_count});
  reduce_arrays(reduction, arrays);
  unpack(element, buffer, small);
}

}  // namespace ringtrain
