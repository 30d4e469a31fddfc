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
  // where they surely come.
  TreeChannel(Wire& wire, double patience_s)
      : TreeChannel(wire, patience_s, std::vector<size_t>(static_cast<size_t>(wire.size()), 1)) {}
  // `messages`: how many messages each rank gives to gather(Gathered).
  TreeChannel(Wire& wire, double patience_s, std::vector<size_t> messages)
      : Channel(wire.rank(), wire.size()),
        wire_(wire),
        patience_s_(patience_s),
        arrived_(is_direct() ? static_cast<size_t>(size()) : 1),
        messages_(std::move(messages)) {}

  void begin_and(const Words&) override;
  bool finish_and(Words& words, double deadline) override;
  bool is_direct() const override { return size() <= kMostDirect; }
  // A rank sends its value to all others, and hears theirs: among many, long ones would take longer than another round.
  static size_t most_value_bytes(size_t ranks) {
    const size_t others = ranks - 1;
    return others == 0 || ranks > kMostDirect ? 0 : Value::kMostBytes / (others * others);
  }
  size_t most_value_bytes() const override { return most_value_bytes(static_cast<size_t>(size())); }
  void put_value(const Value& value) override {
    if (is_direct()) next_value_ = value;
  }
  Value value_of(int rank) override {
    if (!is_direct()) return {};
    return rank == this->rank() ? own_value_ : arrived_[static_cast<size_t>(rank)].value;
  }
  Gathered gather(const Bytes& mine) override { return gather(Gathered(mine)); }
  // The same where each rank has gathered some before, such as those of its node.
  Gathered gather(Gathered mine);
  Bytes broadcast(const Bytes& mine) override;
  bool is_called() override;

 private:
  static constexpr int kChildren = 4;

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
  // A message of a round: how many words, the words, and the value of its sender: its slot, its bytes and its
  // beginning. The rest follows: the receiver has memory ready for as long a message as may come, which costs more than
  // a message.
  struct ValueHead {
    int32_t slot;
    uint32_t bytes;
  };
  static constexpr size_t kMostBehindWords = 4 << 10;
  // Most MPIs ask the receiver first over TCP from 64 KB on, which takes a round trip.
  static constexpr size_t kMostAtOnce = 60 << 10;
  struct Arrived {
    Bytes message;
    Value value;
  };
  size_t head_bytes(size_t words) const {
    return (1 + words) * sizeof(uint64_t) + (is_direct() ? sizeof(ValueHead) : 0);
  }
  void pack(const Words& words);
  void send_round(int to);
  void receive_round(int from, Words& words);
  void receive_value(int from, size_t head_bytes, Arrived& arrived);
  // Clears the bits that `from` has not set.
  void hear(int from, Words& words);
  void receive_gathered(int from, int ranks, Gathered& gathered);

  Wire& wire_;
  const double patience_s_;
  Value own_value_, next_value_;
  std::vector<Arrived> arrived_;        // in this round, of each rank; where no values travel, the last one
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
  // the order of nodes, which carries values; null on all other ranks.
  NodeChannel(int rank, int size, std::unique_ptr<Channel> node, std::unique_ptr<TreeChannel> cross,
              const std::vector<std::vector<int>>& ranks_of_node);

  void begin_and(const Words& words) override;
  bool finish_and(Words& words, double deadline) override;
  bool is_direct() const override { return nodes_ <= TreeChannel::kMostDirect && node_->keeps_deadlines(); }
  void go_on() override;
  // Where each node has one rank, the values of all ranks travel. Elsewhere the sums of the nodes do.
  size_t most_value_bytes() const override;
  void put_value(const Value& value) override;
  Value value_of(int rank) override {
    return is_alone_everywhere() ? cross_->value_of(node_of_rank_[static_cast<size_t>(rank)]) : Value();
  }
  void add_by(NodeSums& sums) override { sums_ = &sums; }
  Value sum_of_all() override { return sum_of_all_; }
  Gathered gather(const Bytes& mine) override;
  int rank_at(size_t place) const override { return ranks_[place]; }
  Bytes broadcast(const Bytes& mine) override;

  bool is_called() override { return node_->is_called() || (cross_ && cross_->is_called()); }

 private:
  bool is_alone_everywhere() const { return nodes_ == static_cast<size_t>(size()); }
  // Sends the words of the node to the others, with its sum.
  void cross(const Value& sum);
  // Whether each rank of the node has put a value for the same slot.
  bool has_node_put();
  // At the first rank of the node. Whether each node has.
  bool have_all_put();

  const std::unique_ptr<Channel> node_;
  const std::unique_ptr<TreeChannel> cross_;
  const size_t nodes_;
  NodeSums* sums_ = nullptr;
  Words words_;            // of this rank, or of its node
  bool has_come_ = false;  // those of all its ranks
  Value own_value_, next_value_, sum_of_all_;
  std::vector<int> ranks_;  // node by node
  std::vector<int> node_of_rank_;
};

}  // namespace ringtrain
