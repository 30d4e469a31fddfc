#include "memory/arena.h"

#include <unistd.h>

#include <algorithm>

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
  blocks_[0] = {region_bytes_, true};
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

// The first free block that is large enough; what it has too much becomes another one.
size_t Arena::take(size_t bytes) {
  const Lock lock(mutex_);
  const auto block = std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& entry) {
    return entry.second.is_free && entry.second.bytes >= bytes;
  });
  if (block == blocks_.end()) throw no_room(bytes);
  const size_t rest = block->second.bytes - bytes;
  if (rest > 0) blocks_[block->first + bytes] = {rest, true};
  block->second = {bytes, false};
  return block->first;
}

// Joins the block with its free neighbours. Of its pages those go back that nobody else has a part of now.
void Arena::free(const char* memory) {
  const Lock lock(mutex_);
  auto block = blocks_.find(static_cast<size_t>(memory - own()));
  const size_t first = down(block->first, page()), end = up(block->first + block->second.bytes, page());
  block->second.is_free = true;
  if (const auto next = std::next(block); next != blocks_.end() && next->second.is_free) {
    block->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (block != blocks_.begin() && std::prev(block)->second.is_free) {
    const auto before = std::prev(block);
    before->second.bytes += block->second.bytes;
    blocks_.erase(block);
    block = before;
  }
  const size_t first_free = std::max(first, up(block->first, page()));
  const size_t end_free = std::min(end, down(block->first + block->second.bytes, page()));
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
