// A Channel over a Wire in which no rank handles more than a few messages per call.
//
// In and_bits, few ranks send their words to each other: a round lasts one hop, and each message may also have room for
// a value of its sender. Among more ranks the words go up and down a tree in which every rank has up to four children:
// a rank that has heard of all its children tells its parent what they have in common, and rank 0 tells the result. So
// a rank sends and receives at most 14 messages, whatever the size of the world. A round of the tree lasts 2 log4(size)
// hops, as many as log2(size) steps of dissemination. gather and broadcast, which only news need, use a binomial tree.
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
  // Up to so many ranks send their words to each other. These are n (n - 1) messages in place of the 2 (n - 1) of a
  // tree, but a rank has the result as soon as the last one has come, and wakes up once. Even where two cores send all
  // of them, a round of 8 ranks takes 0.6 times as long, one of 12 ranks 0.9 times. Between hosts a round takes half a
  // round trip, and not one or more. From 9 ranks on, connections between all would cost more than that gives.
  static constexpr int kMostDirect = 8;

  // `patience_s`: how long to wait for the others to come to a round by themselves before they are called; infinity
  // where they surely come. `carries_values`: if there are at most kMostDirect; the same on all ranks.
  TreeChannel(Wire& wire, double patience_s, bool carries_values)
      : TreeChannel(wire, patience_s, carries_values, std::vector<size_t>(static_cast<size_t>(wire.size()), 1)) {}
  // `messages`: how many messages each rank gives to gather(Gathered).
  TreeChannel(Wire& wire, double patience_s, bool carries_values, std::vector<size_t> messages)
      : Channel(wire.rank(), wire.size()),
        wire_(wire),
        patience_s_(patience_s),
        values_(carries_values && is_direct() ? static_cast<size_t>(size()) : 0),
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

  bool is_direct() const { return size() <= kMostDirect; }
  // In an order in which not all ranks begin with the same one.
  template <typename Visit>
  void for_each_other(Visit visit) const {
    for (int distance = 1; distance < size(); ++distance) visit((rank() + distance) % size());
  }
  // Calls those that do not come to the round by themselves in a moment.
  void call_late();

  void go_up_and_down(Words& words);
  int parent() const { return (rank() - 1) / kChildren; }
  int first_child() const { return rank() * kChildren + 1; }
  int end_of_children() const { return std::min(size(), first_child() + kChildren); }

  void call_neighbours();

  void call(int rank) { wire_.send(rank, Tag::call, &round_, sizeof(round_)); }
  // A message of a round: how many words, the words, and the value of its sender.
  size_t message_bytes(size_t words) const {
    return (1 + words) * sizeof(uint64_t) + (values_.empty() ? 0 : sizeof(SmallValue));
  }
  void pack(const Words& words);
  void send_round(int to) { wire_.send(to, Tag::bits, message_.data(), message_.size()); }
  void receive_round(int from, Words& words);
  // Clears the bits that `from` has not set.
  void hear(int from, Words& words);
  void receive_gathered(int from, int ranks, Gathered& gathered);

  Wire& wire_;
  const double patience_s_;
  SmallValue own_value_;
  std::vector<SmallValue> values_;      // of each rank in this round; empty if none travel
  const std::vector<size_t> messages_;  // by rank
  Bytes message_;
  Words theirs_;
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
