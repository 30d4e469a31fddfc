#include "kvstore/store/rows.h"

#include <algorithm>

namespace ringtrain {

ChunkRows rows_of_piece(const Layout& layout, size_t piece, const std::vector<int64_t>& rows, size_t elements,
                        bool all_chunks) {
  ChunkRows found;
  size_t first = 0;  // row that ends behind the beginning of the chunk
  for (size_t number = layout.first_chunk(piece); number < layout.first_chunk(piece + 1); ++number) {
    const KeyChunk& chunk = layout.chunks()[number];
    const uint64_t begin = layout.spec().pieces[piece].begin + chunk.begin, end = begin + chunk.count;
    const auto begin_of = [&](size_t i) { return static_cast<uint64_t>(rows[i]) * elements; };
    while (first < rows.size() && begin_of(first) + elements <= begin) ++first;
    RowsOfChunk of_chunk{static_cast<uint32_t>(number), {}, 0, 0};
    for (size_t i = first; i < rows.size() && begin_of(i) < end; ++i) {
      const uint64_t from = std::max(begin, begin_of(i)), to = std::min(end, begin_of(i) + elements);
      if (of_chunk.count == 0) of_chunk.begin = i * elements + (from - begin_of(i));
      of_chunk.count += to - from;
      const auto there = static_cast<uint32_t>(from - begin), count = static_cast<uint32_t>(to - from);
      auto& ranges = of_chunk.ranges;
      if (!ranges.empty() && ranges.back().begin + ranges.back().count == there)
        ranges.back().count += count;
      else
        ranges.push_back({there, count});
    }
    if (all_chunks || of_chunk.count > 0) found.push_back(std::move(of_chunk));
  }
  return found;
}

}  // namespace ringtrain
