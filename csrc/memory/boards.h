// Boards in shared memory, on which each member writes what the others read, and a count of what each has put there.
#pragma once

#include <cstddef>

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
  Flag& posted(int member) { return reinterpret_cast<Posted*>(memory_)[member].flag; }
  // Two boards each, used in turn. Written by that member only.
  char* board(int member, int parity) {
    return memory_ + static_cast<size_t>(size_) * sizeof(Posted) +
           static_cast<size_t>(2 * member + parity) * board_bytes_;
  }

 private:
  struct Posted {
    alignas(64) Flag flag;
  };
  static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

  char* memory_;
  int size_;
  size_t board_bytes_;
};

}  // namespace ringtrain
