// The ranks of one node, through a shared segment: doorbells that wake them, boards to write on, signs of life, last
// words.
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
#include "memory/shm.h"

namespace ringtrain {

class Node final : public NewsSource {
 public:
  static size_t bytes(int size, size_t board_bytes);

  // Holds the life lock of `index` from now on.
  Node(SharedSegment segment, int index, std::vector<RankName> members, size_t board_bytes);

  int index() const { return index_; }
  int size() const { return static_cast<int>(members_.size()); }
  size_t board_bytes() const { return board_bytes_; }

  // Any thread. A doorbell only wakes; what there is to do stands elsewhere.
  Flag& doorbell(int member) { return control(member).doorbell; }
  // Counts what `member` has put on its boards. Written by that member only.
  Flag& posted(int member) { return control(member).posted; }
  // Two boards each, used in turn. Written by that member only.
  char* board(int member, int parity);

  // Tells the others why this rank cannot go on; the first word counts.
  void say_last_words(ErrorKind kind, const std::string& message);
  // This rank ends well: its process may go.
  void leave() { control(index_).has_left.store(1, std::memory_order_release); }
  // Any thread. Throws PeerLost if a member is dead, or what a member said last.
  void listen() override;
  double pause_s() const override { return kRollCall_s; }
  double interval_s(double) const override { return kRollCall_s; }
  std::string who_is_stopped(double waited_s) const override;

  void unlink() { segment_.unlink(); }

 private:
  static constexpr double kRollCall_s = 0.02;

  struct Control {
    alignas(64) Flag doorbell;
    alignas(64) Flag posted;
    alignas(64) std::atomic<uint32_t> has_failed;
    std::atomic<uint32_t> has_left;
    ErrorKind failure_kind;
    char failure_message[kLongestErrorText + 1];
  };

  Control& control(int member) { return reinterpret_cast<Control*>(segment_.data())[member]; }

  SharedSegment segment_;
  const int index_;
  const std::vector<RankName> members_;
  const size_t board_bytes_;
};

}  // namespace ringtrain
