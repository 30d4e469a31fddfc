// Memory that each rank of a node hands out to its user and that all of them can read and write: an operation on arrays
// that live here needs no copies. (OpenSHMEM and NVSHMEM call such memory a symmetric heap.)
//
// One sparse segment; every member has a region of its own in it, as large as the machine's memory. Pages are reserved
// when they are handed out, and go back to the system when they are free.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "base/thread_annotations.h"
#include "memory/shm.h"

namespace ringtrain {

// Shared with the memory that it hands out.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  static size_t bytes(int size);

  // `member`: this rank's place on the node.
  Arena(SharedSegment segment, int size, int member);

  // Any thread. At least `bytes`, not initialised, on a cache line; they go back when nobody in this process holds them
  // any more. Throws Error(failure) when /dev/shm is full. Takes as long as the system needs to zero the pages, and
  // keeps no other thread meanwhile.
  std::shared_ptr<char> allocate(size_t bytes);

  // Where `memory` is in this rank's region, if `bytes` from there on were handed out by it.
  std::optional<size_t> find(const void* memory, size_t bytes) const;
  // The same place in the region of any member.
  char* at(int member, size_t offset) { return segment_.data() + static_cast<size_t>(member) * region_bytes_ + offset; }

 private:
  struct Block {
    size_t bytes;
    bool is_free;
  };
  using Blocks = std::map<size_t, Block>;

  char* own() const { return segment_.data() + static_cast<size_t>(member_) * region_bytes_; }
  size_t in_segment(size_t offset) const { return static_cast<size_t>(member_) * region_bytes_ + offset; }
  size_t take(size_t bytes);
  void add_free(size_t offset, size_t bytes) REQUIRES(mutex_);
  void free(const char* memory);

  SharedSegment segment_;
  const size_t region_bytes_;
  const int member_;

  mutable Mutex mutex_;
  Blocks blocks_ GUARDED_BY(mutex_);                                    // by offset, without gaps
  std::set<std::pair<size_t, size_t>> free_blocks_ GUARDED_BY(mutex_);  // bytes and offset
};

}  // namespace ringtrain
