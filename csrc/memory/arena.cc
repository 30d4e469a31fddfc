#include "memory/arena.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "base/fork.h"

namespace ringtrain {
namespace {

constexpr size_t kLine = 64;

size_t up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t down(size_t bytes, size_t unit) { return bytes / unit * unit; }

Error no_room(size_t bytes) { return failure("no room for " + std::to_string(bytes >> 20) + " MB of shared memory"); }

size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// Address space for 64 ranks of a large machine still is a small part of the 128 TB that a process has.
size_t region_bytes() {
  constexpr size_t kMost = size_t{512} << 30;
  return up(std::min(kMost, static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page()), page());
}

}  // namespace

size_t Arena::bytes(int size) { return static_cast<size_t>(size) * region_bytes(); }

Arena::Arena(SharedSegment segment, int size, int member)
    : segment_(std::move(segment)), region_bytes_(bytes(size) / static_cast<size_t>(size)), member_(member) {
  add_free(0, region_bytes_);
}

std::shared_ptr<char> Arena::allocate(size_t bytes) {
  if (bytes > region_bytes_) throw no_room(bytes);  // rounded up it might be 0
  const size_t size = up(std::max<size_t>(bytes, 1), kLine), offset = take(size);
  std::shared_ptr<char> memory =
      owned_here(own() + offset, [arena = shared_from_this()](char* block) { arena->free(block); });
  const size_t first = down(offset, page());
  segment_.reserve(in_segment(first), up(offset + size, page()) - first);
  return memory;
}

// The smallest free block that is large enough, the first of those; what it has too much becomes another one.
size_t Arena::take(size_t bytes) {
  const Lock lock(mutex_);
  const auto smallest = free_blocks_.lower_bound({bytes, 0});
  if (smallest == free_blocks_.end()) throw no_room(bytes);
  const auto [size, offset] = *smallest;
  free_blocks_.erase(smallest);
  blocks_[offset] = {bytes, false};
  if (size > bytes) add_free(offset + bytes, size - bytes);
  return offset;
}

void Arena::add_free(size_t offset, size_t bytes) {
  blocks_[offset] = {bytes, true};
  free_blocks_.insert({bytes, offset});
}

// Joins the block with its free neighbours. Of its pages those go back that nobody else has a part of now.
void Arena::free(const char* memory) {
  const Lock lock(mutex_);
  const auto block = blocks_.find(static_cast<size_t>(memory - own()));
  size_t begin = block->first, end = begin + block->second.bytes;
  const size_t first = down(begin, page()), last = up(end, page());
  const auto next = blocks_.erase(block);
  if (next != blocks_.end() && next->second.is_free) end += next->second.bytes;
  if (next != blocks_.begin() && std::prev(next)->second.is_free) begin = std::prev(next)->first;
  for (auto it = blocks_.lower_bound(begin); it != blocks_.end() && it->first < end; it = blocks_.erase(it))
    free_blocks_.erase({it->second.bytes, it->first});
  add_free(begin, end - begin);
  const size_t first_free = std::max(first, up(begin, page())), end_free = std::min(last, down(end, page()));
  if (first_free < end_free) segment_.release(in_segment(first_free), end_free - first_free);
}

std::optional<size_t> Arena::find(const void* memory, size_t bytes) const {
  const char* first = static_cast<const char*>(memory);
  if (first < own() || first >= own() + region_bytes_) return std::nullopt;
  const auto offset = static_cast<size_t>(first - own());
  const Lock lock(mutex_);
  const auto block = std::prev(blocks_.upper_bound(offset));
  if (block->second.is_free || offset + bytes > block->first + block->second.bytes) return std::nullopt;
  return offset;
}

}  // namespace ringtrain
