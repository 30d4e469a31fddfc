// Sums of which only codes of two bits or one travel between the nodes.
//
// The ranks of a node sum in full. Each column of the node makes codes of its slice of that sum, with what it has left
// out before, and gets those of its slice from the same columns of the other nodes. The ranks of a node give each other
// the codes of all columns, and every rank adds up what they mean in the order of the nodes: the same bits everywhere.
//
// Which column has which elements depends on each tensor alone, so its residual stays right however tensors are joined
// into plans.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/group.h"
#include "kernels/quantize.h"

namespace ringtrain {

// Keeps its buffers. Requires Engine::turn_.
class Quantized {
 public:
  // Factors of the sum of a node before it is quantized, and of the sum of the nodes.
  struct Scales {
    double before, after;
  };
  // One tensor, and what was left out of it so far: as many elements, of which each rank changes those of its column.
  struct Tensor {
    Piece piece;  // of float32
    float* residual;
  };
  // Of all ranks of `group`, as Group::allreduce.
  void allreduce(Group& group, const Quantizer& quantizer, const Scales& scales, const std::vector<Tensor>& tensors);

 private:
  class Operation;
  Scratch codes_;
};

}  // namespace ringtrain
