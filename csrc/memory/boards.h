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
    return first_board(size) + static_cast<size_t>(size) * 2 * padded(board_bytes);
  }
  // `memory` outlives this.
  Boards(char* memory, int size, size_t board_bytes)
      : memory_(memory), size_(size), board_bytes_(padded(board_bytes)) {}

  int size() const { return size_; }
  size_t board_bytes() const { return board_bytes_; }
  // Any thread. Counts what `member` has put on its boards. Written by that member only.
  Flag& posted(int member) { return reinterpret_cast<Posted*>(memory_)[member].flag; }
  const Flag& posted(int member) const { return reinterpret_cast<const Posted*>(memory_)[member].flag; }
  // Any thread. At which count of all members `member` wants to be called, of which it does not wait here; 0 at first.
  // Written by that member only, and seldom. All others look at it in each exchange: so it is not on the cache line of
  // its count, which they would take away from it.
  std::atomic<uint32_t>& wanted(int member) {
    return reinterpret_cast<std::atomic<uint32_t>*>(memory_ + static_cast<size_t>(size_) * sizeof(Posted))[member];
  }
  // Two boards each, used in turn. Written by that member only.
  char* board(int member, int parity) {
    return memory_ + first_board(size_) + static_cast<size_t>(2 * member + parity) * board_bytes_;
  }

 private:
  // Processors fetch the cache line beside one that they need, too.
  struct Posted {
    alignas(128) Flag flag;
  };
  static size_t first_board(int size) {
    const auto members = static_cast<size_t>(size);
    return members * sizeof(Posted) + padded(members * sizeof(std::atomic<uint32_t>));
  }
  static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

  char* memory_;
  int size_;
  size_t board_bytes_;
};

}  // namespace ringtrain
