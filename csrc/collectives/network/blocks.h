// Arrays cut into blocks, blocks into a slice for each rank, slices into chunks: a chunk is what one message carries.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

// Slices laid end to end; counts[r] elements for rank r.
struct Block {
  const char* source;
  char* destination;
  Counts counts;
};

// Calls visit(begin, count) for as few parts of `count` elements, all about as long, as there can be if none is longer
// than `most`, a multiple of 64.
template <typename Visit>
void for_each_part(size_t count, size_t most, Visit visit) {
  if (count == 0) return;
  const size_t parts = (count + most - 1) / most;
  const size_t usual = ((count + parts - 1) / parts + 63) / 64 * 64;
  for (size_t begin = 0; begin < count; begin += usual) visit(begin, std::min(usual, count - begin));
}

class Blocks {
 public:
  // Sources and destinations have elements of so many bytes.
  struct Elements {
    size_t source_bytes, destination_bytes;
  };
  Blocks(std::vector<Block> blocks, const Elements& elements, size_t chunk_elements)
      : blocks_(std::move(blocks)), elements_(elements), chunk_elements_(chunk_elements) {
    size_t longest = 0;
    for (const Block& block : blocks_) {
      offsets_.push_back(offsets_of(block.counts));
      longest = std::max(longest, *std::max_element(block.counts.begin(), block.counts.end()));
    }
    chunks_per_slice_ = (longest + chunk_elements - 1) / chunk_elements;
  }

  size_t size() const { return blocks_.size(); }
  size_t chunk_elements() const { return chunk_elements_; }
  // Of the longest slice of all; the last chunks of the others are short or empty.
  size_t chunks_per_slice() const { return chunks_per_slice_; }

  struct Chunk {
    const char* source;
    char* destination;
    size_t count;  // elements
  };
  Chunk chunk(size_t block, int slice, size_t index) const {
    const Block& it = blocks_[block];
    const size_t length = it.counts[slice];
    const size_t begin = std::min(length, index * chunk_elements_);
    const size_t offset = offsets_[block][slice] + begin;
    return {it.source + offset * elements_.source_bytes, it.destination + offset * elements_.destination_bytes,
            std::min(chunk_elements_, length - begin)};
  }

 private:
  const std::vector<Block> blocks_;
  const Elements elements_;
  const size_t chunk_elements_;
  std::vector<Counts> offsets_;  // of the slices of each block
  size_t chunks_per_slice_ = 0;
};

}  // namespace ringtrain
