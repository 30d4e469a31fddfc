#include "collectives/flat_group.h"

#include <cstring>

namespace ringtrain {
namespace {

constexpr size_t kLargeBytes = 1 << 20;   // from here on packing costs more than another operation
constexpr size_t kPackedBytes = 8 << 20;  // a packed buffer still fits into cache

}  // namespace

void FlatGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  const size_t element = size_of(reduction.dtype);
  std::vector<Piece> small;
  size_t small_count = 0;
  auto reduce_small = [&] {
    if (!small.empty()) allreduce_packed(reduction, small, small_count);
    small.clear();
    small_count = 0;
  };
  for (const Piece& piece : pieces) {
    if (piece.count * element >= kLargeBytes || pieces.size() == 1) {
      if (piece.count == 0) continue;
      if (piece.destination != piece.source) std::memcpy(piece.destination, piece.source, piece.count * element);
      allreduce_in_place(reduction, piece.destination, piece.count);
      continue;
    }
    if ((small_count + piece.count) * element > kPackedBytes) reduce_small();
    small.push_back(piece);
    small_count += piece.count;
  }
  reduce_small();
}

void FlatGroup::allreduce_packed(const Reduction& reduction, const std::vector<Piece>& pieces, size_t count) {
  if (count == 0) return;
  const size_t element = size_of(reduction.dtype);
  char* buffer = packed_.get(count * element);
  pack(element, pieces, buffer);
  allreduce_in_place(reduction, buffer, count);
  unpack(element, buffer, pieces);
}

}  // namespace ringtrain
