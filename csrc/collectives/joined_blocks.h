// Arrays cut into slices, each of which has an owner among the ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

// Slices laid end to end; counts[r] elements for rank r.
struct Block {
  const char* source;
  char* destination;
  Counts counts;
};

// Blocks as fewer, longer ones in which every element has the owner that it had.
class JoinedBlocks {
 public:
  // Of blocks of so many elements, or somewhat less. Several are copied to `packed`, one is left where it is.
  JoinedBlocks(std::vector<Block> blocks, size_t most_elements, size_t element_bytes, Scratch& packed);

  const std::vector<Block>& joined() const { return joined_; }
  // Copies what has become of them to the destinations.
  void unpack() const;

 private:
  // Calls visit(block, bytes before the slice, place in `packed`, bytes) for each slice of each block.
  template <typename Visit>
  void for_each_slice(Visit visit) const;

  const std::vector<Block> blocks_;
  const size_t element_bytes_;
  char* packed_ = nullptr;    // null where no block is copied
  std::vector<size_t> ends_;  // in blocks_, of what is joined to one
  std::vector<Block> joined_;
};

}  // namespace ringtrain
