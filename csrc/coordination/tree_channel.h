// A Channel over a Wire in which no rank handles more than a few messages per call.
//
// and_bits goes up and down a tree in which every rank has up to four children: a rank that has heard of all its
// children tells its parent what they have in common, and rank 0 tells the result. So a rank handles at most ten
// messages, whatever the size of the world, and a round lasts as many hops, 2 log4(size), as log2(size) steps of
// dissemination would. gather and broadcast, which only news need, use a binomial tree.
#pragma once

#include <algorithm>

#include "coordination/channel.h"
#include "coordination/wire.h"

namespace ringtrain {

class TreeChannel final : public Channel {
 public:
  // `patience_s`: how long to wait for the others to come to a round by themselves before they are called; infinity
  // where they surely come.
  TreeChannel(Wire& wire, double patience_s)
      : Channel(wire.rank(), wire.size()), wire_(wire), patience_s_(patience_s) {}

  void begin_and(const Words&) override { ++round_; }
  bool finish_and(Words& words, double deadline) override;
  std::vector<Bytes> gather(const Bytes& mine) override;
  Bytes broadcast(const Bytes& mine) override;
  bool is_called() override;

 private:
  static constexpr int kChildren = 4;

  int parent() const { return (rank() - 1) / kChildren; }
  int first_child() const { return rank() * kChildren + 1; }
  int end_of_children() const { return std::min(size(), first_child() + kChildren); }

  void call_neighbours();
  std::vector<Bytes> received_blobs(int from, size_t count);

  Wire& wire_;
  const double patience_s_;
  uint64_t round_ = 0;       // and_bits begun so far
  uint64_t called_for_ = 0;  // the latest one that somebody has called for
};

}  // namespace ringtrain
