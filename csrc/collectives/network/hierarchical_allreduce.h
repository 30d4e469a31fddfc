// One allreduce of a HierarchicalGroup with its three stages at work at the same time, each on another block.
#pragma once

#include <memory>
#include <vector>

#include "collectives/network/hierarchical_group.h"

namespace ringtrain {

class HierarchicalAllreduce {
 public:
  // What 16-bit floats are summed in.
  struct Wide {
    Scratch &block, &slices;
  };
  HierarchicalAllreduce(const HierarchicalGroup::Parts& parts, const Reduction& reduction,
                        const std::vector<Piece>& arrays, const Wide& wide);
  void run();

 private:
  // What is left to be done between the nodes, and what comes of it.
  struct Slice {
    char *source, *destination;
    size_t count;  // elements
  };
  Slice slice(size_t k) const;

  void reduce_on_node(size_t k);
  void gather_on_node(size_t k);

  const HierarchicalGroup::Parts& parts_;
  const Reduction reduction_;
  const bool is_wide_;
  const DType dtype_;     // of the sums
  const size_t element_;  // bytes of a result
  // How many blocks may be behind the one that is waited for: the ring needs one for each of its steps.
  const size_t ahead_;
  const std::vector<Block> blocks_;
  size_t longest_slice_ = 0;
  float *wide_block_ = nullptr, *wide_slices_ = nullptr;
  std::unique_ptr<Stream> stream_;  // null when this rank has no lane
};

}  // namespace ringtrain
