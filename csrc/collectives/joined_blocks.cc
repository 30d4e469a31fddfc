#include "collectives/joined_blocks.h"

#include <utility>

#include "kernels/copy.h"

namespace ringtrain {

JoinedBlocks::JoinedBlocks(std::vector<Block> blocks, size_t most_elements, size_t element_bytes, Scratch& packed)
    : blocks_(std::move(blocks)), element_bytes_(element_bytes) {
  if (blocks_.size() <= 1) {
    joined_ = blocks_;
    return;
  }
  size_t total = 0, in_block = most_elements;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const size_t count = total_of(blocks_[i].counts);
    if (in_block + count > most_elements) {
      joined_.push_back({nullptr, nullptr, Counts(blocks_[i].counts.size())});
      ends_.push_back(i);
      in_block = 0;
    }
    for (size_t r = 0; r < blocks_[i].counts.size(); ++r) joined_.back().counts[r] += blocks_[i].counts[r];
    ends_.back() = i + 1;
    in_block += count;
    total += count;
  }
  packed_ = packed.get(total * element_bytes);
  char* next = packed_;
  for (Block& block : joined_) {
    block.source = block.destination = next;
    next += total_of(block.counts) * element_bytes;
  }
  for_each_slice(
      [](const Block& block, size_t offset, char* place, size_t bytes) { copy(place, block.source + offset, bytes); });
}

void JoinedBlocks::unpack() const {
  if (!packed_) return;
  for_each_slice([](const Block& block, size_t offset, const char* place, size_t bytes) {
    copy(block.destination + offset, place, bytes);
  });
}

template <typename Visit>
void JoinedBlocks::for_each_slice(Visit visit) const {
  char* place = packed_;
  std::vector<size_t> read(blocks_.size());  // bytes of each block
  size_t begin = 0;
  for (const size_t end : ends_) {
    for (size_t r = 0; r < blocks_[begin].counts.size(); ++r)
      for (size_t i = begin; i < end; ++i) {
        const size_t bytes = blocks_[i].counts[r] * element_bytes_;
        visit(blocks_[i], read[i], place, bytes);
        read[i] += bytes;
        place += bytes;
      }
    begin = end;
  }
}

}  // namespace ringtrain
