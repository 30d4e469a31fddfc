// Ranks on several nodes: reduced inside each node first, then between the nodes, then gathered inside the nodes, so
// that a node's link carries every value once.
//
// A node has as many lanes as the node with the fewest ranks. The first so many ranks of each node own a slice of every
// block and ring it with the ranks of the same place on the other nodes. The three stages overlap: while blocks are on
// the wire, those behind them are reduced and those before them gathered in shared memory.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "collectives/group_with_fallback.h"
#include "collectives/network/network_group.h"
#include "collectives/network/pipeline.h"
#include "collectives/scratch.h"

namespace ringtrain {

class HierarchicalGroup final : public GroupWithFallback {
 public:
  struct Parts {
    std::unique_ptr<StreamWatch> watch;   // of `node`
    std::unique_ptr<Group> node;          // the ranks of this node
    std::shared_ptr<NetworkGroup> cross;  // those with this rank's place on every node; null when it has no lane
    int nodes, lanes;
    bool may_overlap;  // the same on all ranks

    // This rank among those of its node.
    size_t place() const { return static_cast<size_t>(node->rank()); }
    // What of `count` elements each rank of the node owns.
    Counts lane_counts(size_t count) const;
  };
  // `flat`: all ranks, for what has no hierarchical form.
  HierarchicalGroup(Parts parts, std::shared_ptr<Group> flat)
      : GroupWithFallback(std::move(flat)), parts_(std::move(parts)) {}
  const char* name() const override { return "hierarchical"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  Levels levels() override { return {parts_.node.get(), parts_.cross.get(), parts_.nodes, parts_.lanes}; }

 private:
  class Overlapped;

  void reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays);
  // The stages one after the other.
  void reduce_array(const Reduction& reduction, const Piece& array);

  const Parts parts_;
  Scratch packed_, wide_, wide_slices_;
};

}  // namespace ringtrain
