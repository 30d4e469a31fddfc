// Some rows of a key, as chunks see them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvstore/store/layout.h"

namespace ringtrain {

// Of one chunk: which of its elements, and where these lie together in an array of the rows, one behind the other.
struct RowsOfChunk {
  uint32_t chunk;
  ElementRanges ranges;
  size_t begin, count;  // elements of that array
};

using ChunkRows = std::vector<RowsOfChunk>;

// `rows`: in order, each once, of `elements` each. With `all_chunks` also those in which no row lies.
ChunkRows rows_of_piece(const Layout& layout, size_t piece, const std::vector<int64_t>& rows, size_t elements,
                        bool all_chunks);

}  // namespace ringtrain
