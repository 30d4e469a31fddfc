// Boards in shared memory, on which each member writes what the others read, and a count of what each has put there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/wait.h"

namespace ringtrain {

// Zeroed memory is a valid beginning.
class Boards {
 public:
  static size_t bytes(int size, size_t board_bytes) {
    return static_cast<size_t>(size) * (sizeof(Posted) + 2 * padded(board_bytes));
  }
  // `memory` outlives this.
  Boards(char* memory, int size, size_t board_bytes)
      : memory_(memory), size_(size), board_bytes_(padded(board_bytes)) {}

  int size() const { return size_; }
  size_t board_bytes() const { return board_bytes_; }
  // Any thread. Counts what `member` has put on its boards. Written by that member only.
  Flag& posted(int member) { return posted_of(member).flag; }
  const Flag& posted(int member) const { return posted_of(member).flag; }
  // Any thread. At which count of all members `member` wants to be called, of which it does not wait here; 0 at first.
  // Written by that member only.
  std::atomic<uint32_t>& wanted(int member) { return posted_of(member).wanted; }
  // Two boards each, used in turn. Written by that member only.
  char* board(int member, int parity) {
    return memory_ + static_cast<size_t>(size_) * sizeof(Posted) +
           static_cast<size_t>(2 * member + parity) * board_bytes_;
  }

 private:
  struct Posted {
    alignas(64) Flag flag;
    std::atomic<uint32_t> wanted;
  };
  Posted& posted_of(int member) const { return reinterpret_cast<Posted*>(memory_)[member]; }
  static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

  char* memory_;
  int size_;
  size_t board_bytes_;
};

}  // namespace ringtrain
