#include "collectives/adasum.h"

#include <algorithm>

#include "kernels/reduce.h"

namespace ringtrain {

// adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b averages what two vectors have in common and sums what is
// orthogonal. It is not associative, so the ranks are the leaves of a tree of neighbours; a rank without one moves up
// as it is:
//
//   0   1   2   3   4      distance 1
//   01      23      4      distance 2
//   0123            4      distance 4
//   01234
//
// A factor needs the dot products of whole vectors, but then each element is by itself. So an alltoall gives every rank
// its slice of everybody's vectors, and it combines the slices of the whole tree. At each level the ranks add up the
// dots of their slices, of all pairs and pieces in one message; an allgather puts the slices together. As many bytes
// travel as in a ring, for any number of ranks, and no rank computes what another does.
//
// 16-bit floats are kept in float32 between the levels and rounded once.

void Adasum::allreduce(Group& group, DType dtype, double factor, const std::vector<Piece>& pieces) {
  size_t total = 0;
  for (const Piece& piece : pieces) total += piece.count;
  if (total == 0) return;
  const size_t element = size_of(dtype);
  const Counts counts = even_slices(total, group.size()), bytes = in_bytes(counts, element);
  const size_t begin = offsets_of(counts)[group.rank()], own = counts[group.rank()];
  const bool is_one = pieces.size() == 1;
  char* packed = is_one ? nullptr : packed_.get(total * element);
  if (!is_one) pack(element, pieces, packed);
  const void* source = is_one ? pieces.front().source : packed;
  char* destination = is_one ? static_cast<char*>(pieces.front().destination) : packed;

  const Counts received(counts.size(), own * element);
  char* data = slices_.get(total_of(received));
  group.alltoall(source, bytes, data, received);
  if (is_half(dtype)) data = widened(dtype, data, own * counts.size());
  const DType wide = is_half(dtype) ? DType::float32 : dtype;
  const Slices slices = {wide, data, own, pieces.size(), ranges_of(pieces, begin, own)};
  for (int distance = 1; distance < group.size(); distance *= 2) climb(group, slices, distance);

  char* own_part = destination + begin * element;
  if (is_half(dtype))
    narrow(dtype, factor, own_part, reinterpret_cast<const float*>(data), own);
  else
    scale(dtype, factor, own_part, data, own);
  group.allgather(own_part, destination, bytes);
  if (!is_one) unpack(element, packed, pieces);
}

std::vector<Adasum::Range> Adasum::ranges_of(const std::vector<Piece>& pieces, size_t slice_begin, size_t slice_count) {
  std::vector<Range> ranges;
  size_t piece_begin = 0;
  for (size_t i = 0; i < pieces.size(); piece_begin += pieces[i].count, ++i) {
    const size_t first = std::max(slice_begin, piece_begin);
    const size_t last = std::min(slice_begin + slice_count, piece_begin + pieces[i].count);
    if (first < last) ranges.push_back({i, first - slice_begin, last - first});
  }
  return ranges;
}

char* Adasum::widened(DType dtype, const char* slices, size_t count) {
  char* wide = wide_.get(count * sizeof(float));
  widen(dtype, reinterpret_cast<float*>(wide), slices, count);
  return wide;
}

// One level of the tree: slices of ranks that are `distance` apart become one, in the place of the left one.
void Adasum::climb(Group& group, const Slices& slices, int distance) {
  const auto pairs = static_cast<size_t>((group.size() + distance - 1) / (2 * distance));
  const size_t count = pairs * slices.pieces;
  auto* dots = reinterpret_cast<Dots*>(dots_.get(count * sizeof(Dots)));
  const auto for_each = [&](auto visit) {
    for (size_t pair = 0; pair < pairs; ++pair) {
      const int left = static_cast<int>(pair) * 2 * distance;
      for (const Range& range : slices.ranges)
        visit(dots[pair * slices.pieces + range.piece], slices.at(left, range.begin),
              slices.at(left + distance, range.begin), range.count);
    }
  };
  std::fill_n(dots, count, Dots());
  for_each([&](Dots& sums, char* a, char* b, size_t length) { sums = dots_of(slices.dtype, a, b, length); });
  group.allreduce({DType::float64}, {{dots, dots, count * sizeof(Dots) / sizeof(double)}});
  for_each([&](Dots& sums, char* a, char* b, size_t length) { add_adaptively(slices.dtype, sums, a, b, length); });
}

}  // namespace ringtrain
