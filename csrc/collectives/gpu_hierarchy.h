// GPUs on several nodes: NCCL inside a node, anything else between the nodes.
//
// As HierarchicalGroup, whose stages in shared memory these are not: a value is reduced to its owner on the node,
// between the owners of the same place on all nodes, and gathered on the node. All of it in the order of the GPU's own
// stream.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

class GpuHierarchy final : public Group {
 public:
  struct Parts {
    std::unique_ptr<Group> node;   // the ranks of this node
    std::unique_ptr<Group> cross;  // those with this rank's place on every node; null when it owns nothing
    std::unique_ptr<Group> flat;   // all ranks, for what has no hierarchical form
    int owners;                    // ranks of a node that own something
  };
  explicit GpuHierarchy(Parts parts) : Group(parts.flat->rank(), parts.flat->size()), parts_(std::move(parts)) {}
  const char* name() const override { return "nccl on nodes"; }
  bool keeps_nan() const override { return false; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                      const Counts& counts) override {
    parts_.flat->reduce_scatter(reduction, source, destination, counts);
  }
  void allgather(const void* source, void* destination, const Counts& bytes) override {
    parts_.flat->allgather(source, destination, bytes);
  }
  void broadcast(void* data, size_t bytes, int root) override { parts_.flat->broadcast(data, bytes, root); }
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override {
    parts_.flat->alltoall(source, send_bytes, destination, receive_bytes);
  }
  void barrier() override { parts_.flat->barrier(); }

 private:
  const Parts parts_;
};

}  // namespace ringtrain
