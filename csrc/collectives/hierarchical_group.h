// Ranks on several nodes, as many on each: reduced inside the node first, then between nodes, where each local rank
// takes its own slice, so that the node's link carries every value once; then gathered inside the node.
#pragma once

#include <memory>

#include "collectives/flat_group.h"

namespace ringtrain {

class HierarchicalGroup final : public FlatGroup {
 public:
  // `node`: the ranks of this node; `cross`: the ranks with this rank's place on every node; `flat`: all ranks, for
  // what has no hierarchical form.
  HierarchicalGroup(std::unique_ptr<Group> node, std::unique_ptr<Group> cross, std::unique_ptr<Group> flat);
  const char* name() const override { return "hierarchical"; }

  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

 private:
  void allreduce_in_place(const Reduction& reduction, void* data, size_t count) override;

  const std::unique_ptr<Group> node_, cross_, flat_;
  Scratch wide_;
};

}  // namespace ringtrain
