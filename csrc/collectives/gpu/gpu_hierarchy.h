// GPUs on several nodes: NCCL inside a node, anything else between the nodes.
//
// As HierarchicalGroup, whose stages in shared memory these are not: a value is reduced to its owner on the node,
// between the owners of the same place on all nodes, and gathered on the node. All of it in the order of the GPU's own
// stream.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "collectives/group_with_fallback.h"
#include "memory/gpu_memory.h"

namespace ringtrain {

class GpuHierarchy final : public GroupWithFallback {
 public:
  struct Parts {
    std::unique_ptr<Group> node;   // the ranks of this node
    std::unique_ptr<Group> cross;  // those with this rank's place on every node; null when it owns nothing
    int owners = 0;                // ranks of a node that own something
  };
  // `fallback`: all ranks, for what has no hierarchical form, or NCCL cannot do.
  GpuHierarchy(Parts parts, std::unique_ptr<Group> fallback, GpuPtr gpu, std::shared_ptr<GpuPool> pool)
      : GroupWithFallback(std::move(fallback)),
        parts_(std::move(parts)),
        gpu_(std::move(gpu)),
        pool_(std::move(pool)) {}
  const char* name() const override { return "nccl on nodes"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;

 private:
  // Of so many elements that the slices of its owners are equal.
  void allreduce_array(const Reduction& reduction, const Piece& piece);

  const Parts parts_;
  const GpuPtr gpu_;
  const std::shared_ptr<GpuPool> pool_;
};

}  // namespace ringtrain
