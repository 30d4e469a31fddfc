// A Channel over a Wire in which no rank handles more than a few messages per call.
//
// and_bits goes up and down a tree in which every rank has up to four children: a rank that has heard of all its
// children tells its parent what they have in common, and rank 0 tells the result. So a rank handles at most ten
// messages, whatever the size of the world, and a round lasts as many hops, 2 log4(size), as log2(size) steps of
// dissemination would. gather and broadcast, which only news need, use a binomial tree.
//
// Among few ranks each message of and_bits may also have room for a value of every rank.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "coordination/channel.h"
#include "coordination/wire.h"

namespace ringtrain {

class TreeChannel final : public Channel {
 public:
  // `patience_s`: how long to wait for the others to come to a round by themselves before they are called; infinity
  // where they surely come. `carries_values`: if there are few ranks; the same on all ranks.
  TreeChannel(Wire& wire, double patience_s, bool carries_values)
      : TreeChannel(wire, patience_s, carries_values, std::vector<size_t>(static_cast<size_t>(wire.size()), 1)) {}
  // `messages`: how many messages each rank gives to gather(Gathered).
  TreeChannel(Wire& wire, double patience_s, bool carries_values, std::vector<size_t> messages)
      : Channel(wire.rank(), wire.size()),
        wire_(wire),
        patience_s_(patience_s),
        values_(carries_values && size() <= kMostWithValues ? static_cast<size_t>(size()) : 0),
        messages_(std::move(messages)) {}

  void begin_and(const Words&) override;
  bool finish_and(Words& words, double deadline) override;
  void put_value(const SmallValue& value) override { own_value_ = value; }
  const SmallValue* value_of(int rank) override {
    return values_.empty() ? nullptr : &values_[static_cast<size_t>(rank)];
  }
  Gathered gather(const Bytes& mine) override { return gather(Gathered(mine)); }
  // The same where each rank has gathered some before, such as those of its node.
  Gathered gather(Gathered mine);
  Bytes broadcast(const Bytes& mine) override;
  bool is_called() override;

 private:
  static constexpr int kChildren = 4;
  static constexpr int kMostWithValues = 8;

  int parent() const { return (rank() - 1) / kChildren; }
  int first_child() const { return rank() * kChildren + 1; }
  int end_of_children() const { return std::min(size(), first_child() + kChildren); }

  void call_neighbours();
  // A message of a round: words, and the values that are known.
  void send_round(int to, const Words& words);
  void receive_round(int from, Words& words);
  void receive_gathered(int from, int ranks, Gathered& gathered);

  Wire& wire_;
  const double patience_s_;
  SmallValue own_value_;
  std::vector<SmallValue> values_;      // of each rank, as far as they are known in this round; empty if none travel
  const std::vector<size_t> messages_;  // by rank
  Bytes message_;
  uint64_t round_ = 0;       // and_bits begun so far
  uint64_t called_for_ = 0;  // the latest one that somebody has called for
};

// A Channel over several nodes, made of Channels: shared memory inside each node, a tree between the first ranks of the
// nodes, who are called leaders and alone hear other nodes.
class NodeChannel final : public Channel {
 public:
  // `ranks_of_node[n]`: the ranks on node n, ascending; rank 0 is on node 0. `cross`: between the leaders, in
  // the order of nodes; null on all other ranks. It carries values only where each node has one rank.
  NodeChannel(int rank, int size, std::unique_ptr<Channel> node, std::unique_ptr<TreeChannel> cross,
              const std::vector<std::vector<int>>& ranks_of_node);

  void begin_and(const Words& words) override { node_->begin_and(words); }
  bool finish_and(Words& words, double deadline) override;
  void put_value(const SmallValue& value) override {
    if (cross_) cross_->put_value(value);
  }
  const SmallValue* value_of(int rank) override {
    return cross_ ? cross_->value_of(node_of_rank_[static_cast<size_t>(rank)]) : nullptr;
  }
  Gathered gather(const Bytes& mine) override;
  int rank_at(size_t place) const override { return ranks_[place]; }
  Bytes broadcast(const Bytes& mine) override;

  bool is_called() override { return node_->is_called() || (cross_ && cross_->is_called()); }

 private:
  const std::unique_ptr<Channel> node_;
  const std::unique_ptr<TreeChannel> cross_;
  std::vector<int> ranks_;  // node by node
  std::vector<int> node_of_rank_;
};

}  // namespace ringtrain
