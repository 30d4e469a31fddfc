// A Channel over several nodes, made of Channels: shared memory inside each node, a tree between the first ranks of the
// nodes, who are called leaders.
#pragma once

#include <memory>

#include "coordination/channel.h"

namespace ringtrain {

class NodeChannel final : public Channel {
 public:
  // `ranks_of_node[n]`: ranks of the world on node n, ascending; rank 0 is on node 0. `cross`: between the leaders, in
  // the order of nodes; null on all other ranks.
  NodeChannel(int rank, int size, std::unique_ptr<Channel> node, std::unique_ptr<Channel> cross,
              std::vector<std::vector<int>> ranks_of_node)
      : Channel(rank, size),
        node_(std::move(node)),
        cross_(std::move(cross)),
        ranks_of_node_(std::move(ranks_of_node)) {}

  void begin_and(const Words& words) override { node_->begin_and(words); }
  bool finish_and(Words& words, double deadline) override;
  std::vector<Bytes> gather(const Bytes& mine) override;
  Bytes broadcast(const Bytes& mine) override;

  bool is_called() override { return node_->is_called() || (cross_ && cross_->is_called()); }

 private:
  const std::unique_ptr<Channel> node_;
  const std::unique_ptr<Channel> cross_;
  const std::vector<std::vector<int>> ranks_of_node_;
};

}  // namespace ringtrain
