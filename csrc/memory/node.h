// The ranks of one node, through a shared segment: doorbells that wake them, boards to write on, rings for words
// between two, signs of life, last words.
//
// The creator of the segment zeroes it, which is a valid beginning for everything in it. Members are numbered from 0 by
// their place on the node (local rank).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/placement.h"
#include "base/wait.h"
#include "memory/boards.h"
#include "memory/rings.h"
#include "memory/shm.h"

namespace ringtrain {

class Node final : public NewsSource {
 public:
  // Of the segment, and of its first part, which has pages at once.
  static size_t bytes(int size, size_t board_bytes) { return rings_begin(size, board_bytes) + Rings::bytes(size); }
  static size_t reserved_bytes(int size, size_t board_bytes) {
    return rings_begin(size, board_bytes) + Rings::reserved_bytes(size);
  }

  // Holds the life lock of `index` from now on.
  Node(SharedSegment segment, int index, std::vector<RankName> members, size_t board_bytes);

  int index() const { return index_; }
  int size() const { return static_cast<int>(members_.size()); }

  // Any thread. A doorbell only wakes; what there is to do stands elsewhere.
  Flag& doorbell(int member) { return control(member).doorbell; }
  // Those of all members, in this segment.
  Boards boards() { return {segment_.data() + members_.size() * sizeof(Control), size(), board_bytes_}; }

  // For words between two ranks.
  Rings& rings() { return rings_; }

  // Tells the others why this rank cannot go on. The words of the first member that says some count.
  void say_last_words(ErrorKind kind, const std::string& message);
  // This rank ends well: its process may go.
  void leave() { control(index_).has_left.store(1, std::memory_order_release); }
  // Any thread. Throws what a member said last, or PeerLost if a member is dead.
  //
  // To ask for one lock, the kernel goes through all locks of the file, for one process at a time: 127 questions of
  // each of 128 members, 50 times a second, keep it busy for 0.44 of each second. So a member asks for the lock of the
  // next one in the circle, which asks for the next one, and the one that finds a dead one tells all. A member that has
  // not looked around lately, because it computes, is stopped or has failed, may find nobody: the one before it also
  // asks for the one behind it, and so on. So all members together ask `size` questions in the pause between two looks.
  void listen() override;
  double pause_s() const override { return kRollCall_s; }
  double interval_s(double) const override { return kRollCall_s; }
  std::string who_is_stopped(double waited_s) const override;

  void unlink() { segment_.unlink(); }

 private:
  static constexpr double kRollCall_s = 0.02;

  struct Control {
    alignas(64) Flag doorbell;
    alignas(64) std::atomic<double> looked_s;  // when it last looked around, on the clock of base/clock.h
    std::atomic<uint32_t> has_left;
    std::atomic<uint32_t> first_to_fail;  // of member 0, for all: its number + 1; 0: nobody has failed
    ErrorKind failure_kind;
    char failure_message[kLongestErrorText + 1];
  };

  void hear_last_words();
  bool has_looked(int member, double lately_s);
  Control& control(int member) { return reinterpret_cast<Control*>(segment_.data())[member]; }

  static size_t rings_begin(int size, size_t board_bytes);

  SharedSegment segment_;
  const int index_;
  const std::vector<RankName> members_;
  const size_t board_bytes_;
  Rings rings_;
};

}  // namespace ringtrain
