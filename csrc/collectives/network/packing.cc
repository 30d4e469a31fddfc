#include "collectives/network/packing.h"

#include "kernels/copy.h"

namespace ringtrain {
namespace {

constexpr size_t kLargeBytes = 1 << 20;  // from here on packing costs more than another operation

}  // namespace

void reduce_packed(const std::vector<Piece>& pieces, size_t element_bytes, Scratch& packed,
                   const std::function<void(const std::vector<Piece>&)>& reduce) {
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

void gather_packed(const std::vector<Group::Gathering>& arrays, int rank, Scratch& packed,
                   const std::function<void(const Group::Gathering&)>& gather) {
  std::vector<Group::Gathering> small;
  for (const Group::Gathering& array : arrays) {
    const size_t total = total_of(array.bytes);
    if (total >= kLargeBytes)
      gather(array);
    else if (total > 0)
      small.push_back(array);
  }
  if (small.empty()) return;
  if (small.size() == 1) return gather(small.front());

  const size_t ranks = small.front().bytes.size(), own = static_cast<size_t>(rank);
  Counts bytes(ranks), written(small.size());
  for (const Group::Gathering& array : small)
    for (size_t r = 0; r < ranks; ++r) bytes[r] += array.bytes[r];
  char* all = packed.get(total_of(bytes));
  char* first = all + offsets_of(bytes)[own];
  char* next = first;
  for (const Group::Gathering& array : small) {
    copy(next, array.source, array.bytes[own]);
    next += array.bytes[own];
  }
  gather({first, all, bytes});
  const char* from = all;
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < small.size(); ++i) {
      copy(static_cast<char*>(small[i].destination) + written[i], from, small[i].bytes[r]);
      written[i] += small[i].bytes[r];
      from += small[i].bytes[r];
    }
  }
}

}  // namespace ringtrain
