#include "collectives/adasum.h"

#include <algorithm>
#include <utility>

#include "collectives/joined_blocks.h"
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
// travel as in a ring, for any number of ranks, and no rank computes what another does. Each vector is sliced by
// itself, and its dots are summed by themselves, so that no bits follow from the vectors that share a plan.
//
// 16-bit floats are kept in float32 between the levels and rounded once.

void Adasum::allreduce(Group& group, DType dtype, double factor, const std::vector<Piece>& pieces) {
  const size_t element = size_of(dtype), rank = static_cast<size_t>(group.rank());
  std::vector<Block> blocks;
  std::vector<Range> ranges;
  size_t own = 0;
  for (const Piece& piece : pieces) {
    if (piece.count == 0) continue;
    blocks.push_back({static_cast<const char*>(piece.source), static_cast<char*>(piece.destination),
                      even_slices(piece.count, group.size())});
    ranges.push_back({own, blocks.back().counts[rank]});
    own += ranges.back().count;
  }
  if (blocks.empty()) return;
  const JoinedBlocks all(std::move(blocks), count_of(pieces), element, packed_);
  const Block& block = all.joined().front();
  const Counts bytes = in_bytes(block.counts, element), received(bytes.size(), own * element);
  char* data = slices_.get(total_of(received));
  group.alltoall(block.source, bytes, data, received);
  if (is_half(dtype)) data = widened(dtype, data, own * bytes.size());
  const DType wide = is_half(dtype) ? DType::float32 : dtype;
  const Slices slices = {wide, data, own, std::move(ranges)};
  for (int distance = 1; distance < group.size(); distance *= 2) climb(group, slices, distance);

  char* own_part = block.destination + offsets_of(bytes)[rank];
  if (is_half(dtype))
    narrow(dtype, factor, own_part, reinterpret_cast<const float*>(data), own);
  else
    scale(dtype, factor, own_part, data, own);
  group.allgather(own_part, block.destination, bytes);
  all.unpack();
}

char* Adasum::widened(DType dtype, const char* slices, size_t count) {
  char* wide = wide_.get(count * sizeof(float));
  widen(dtype, reinterpret_cast<float*>(wide), slices, count);
  return wide;
}

// One level of the tree: slices of ranks that are `distance` apart become one, in the place of the left one.
void Adasum::climb(Group& group, const Slices& slices, int distance) {
  const auto pairs = static_cast<size_t>((group.size() + distance - 1) / (2 * distance));
  const size_t pieces = slices.ranges.size(), count = pairs * pieces;
  auto* dots = reinterpret_cast<Dots*>(dots_.get(count * sizeof(Dots)));
  const auto for_each = [&](auto visit) {
    for (size_t pair = 0; pair < pairs; ++pair) {
      const int left = static_cast<int>(pair) * 2 * distance;
      for (size_t i = 0; i < pieces; ++i) {
        const Range& range = slices.ranges[i];
        visit(dots[pair * pieces + i], slices.at(left, range.begin), slices.at(left + distance, range.begin),
              range.count);
      }
    }
  };
  std::fill_n(dots, count, Dots());
  for_each([&](Dots& sums, char* a, char* b, size_t length) { sums = dots_of(slices.dtype, a, b, length); });
  std::vector<Piece> parts;
  for (size_t i = 0; i < count; ++i) parts.push_back({&dots[i], &dots[i], sizeof(Dots) / sizeof(double)});
  group.allreduce({DType::float64}, parts);
  for_each([&](Dots& sums, char* a, char* b, size_t length) { add_adaptively(slices.dtype, sums, a, b, length); });
}

}  // namespace ringtrain
