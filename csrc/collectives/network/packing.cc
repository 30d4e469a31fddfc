#include "collectives/network/packing.h"

namespace ringtrain {
namespace {

// Calls visit() for each large one of these arrays, or where only one of them is small for that, too. Returns the other
// small ones, which are not empty.
template <typename Array, typename Bytes, typename Visit>
std::vector<Array> small_of(const std::vector<Array>& arrays, Bytes bytes_of, const Visit& visit) {
  std::vector<Array> small;
  for (const Array& array : arrays) {
    const size_t bytes = bytes_of(array);
    if (bytes >= kLargeBytes)
      visit(array);
    else if (bytes > 0)
      small.push_back(array);
  }
  if (small.size() == 1) {
    visit(small.front());
    small.clear();
  }
  return small;
}

}  // namespace

void for_each_way(const Chooser& chooser, const Reduction& reduction, size_t parts,
                  const std::vector<Group::Scattering>& arrays,
                  const std::function<void(Way, const std::vector<Group::Scattering>&)>& visit) {
  size_t all = 0;
  for (const Group::Scattering& array : arrays) all += total_of(array.counts);
  const bool is_any = chooser.has_one_order(reduction);
  const auto way_of = [&](const Group::Scattering& array) {
    return chooser.for_reduce_scatter(reduction, (is_any ? all : total_of(array.counts)) / parts);
  };
  for_each_kind(arrays, way_of, visit);
}

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
  const auto small = small_of(arrays, [](const Group::Gathering& array) { return total_of(array.bytes); }, gather);
  if (small.empty()) return;

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

void scatter_packed(const std::vector<Group::Scattering>& arrays, int rank, size_t element_bytes, Scratch& packed,
                    const std::function<void(const Group::Scattering&)>& scatter) {
  const auto bytes_of = [&](const Group::Scattering& array) { return total_of(array.counts) * element_bytes; };
  const auto small = small_of(arrays, bytes_of, scatter);
  if (small.empty()) return;

  const size_t ranks = small.front().counts.size(), own = static_cast<size_t>(rank);
  Counts counts(ranks), read(small.size());
  for (const Group::Scattering& array : small)
    for (size_t r = 0; r < ranks; ++r) counts[r] += array.counts[r];
  char* all = packed.get(total_of(counts) * element_bytes);
  char* next = all;
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < small.size(); ++i) {
      const size_t bytes = small[i].counts[r] * element_bytes;
      copy(next, static_cast<const char*>(small[i].source) + read[i], bytes);
      read[i] += bytes;
      next += bytes;
    }
  }
  char* sums = all + offsets_of(counts)[own] * element_bytes;
  scatter({all, sums, counts});
  for (const Group::Scattering& array : small) {
    copy(array.destination, sums, array.counts[own] * element_bytes);
    sums += array.counts[own] * element_bytes;
  }
}

}  // namespace ringtrain
