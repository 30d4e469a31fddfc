// Sums between GPUs by an MPI that takes their addresses itself ("CUDA-aware"): no copies through host memory.
//
// MPI knows nothing of streams, so the host waits for what is in the GPU's own one before it calls MPI. What MPI lacks
// (factors, 16-bit floats) and what only moves data takes the other way.
#pragma once

#include <memory>
#include <vector>

#include "collectives/delegating_group.h"
#include "collectives/network/peers.h"
#include "gpu/gpu.h"

namespace ringtrain {

class CudaMpiGroup final : public DelegatingGroup {
 public:
  // All ranks at the same time. `watch` outlives this.
  CudaMpiGroup(Peers peers, GpuPtr gpu, std::unique_ptr<Group> rest, Watch& watch);
  const char* name() const override { return "cuda-aware mpi"; }
  bool keeps_nan() const override { return false; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;

 private:
  void allreduce_in_place(const Reduction& reduction, char* data, size_t count);

  Peers peers_;
  const GpuPtr gpu_;
  Watch& watch_;
  const MpiCommunicator communicator_;
};

}  // namespace ringtrain
