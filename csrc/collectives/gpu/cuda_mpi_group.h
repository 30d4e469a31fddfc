// Sums between GPUs by an MPI that takes their addresses itself ("CUDA-aware"): no copies through host memory.
//
// MPI knows nothing of streams, so the host waits for what is in the GPU's own one before it calls MPI. What MPI lacks
// (factors, 16-bit floats) and what only moves data takes the other way.
#pragma once

#include <memory>
#include <vector>

#include "collectives/group_with_fallback.h"
#include "collectives/network/library.h"
#include "gpu/gpu.h"

namespace ringtrain {

class CudaMpiGroup final : public GroupWithFallback {
 public:
  // All ranks at the same time.
  CudaMpiGroup(Endpoint peers, GpuPtr gpu, std::unique_ptr<Group> fallback);
  const char* name() const override { return "cuda-aware mpi"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;

 private:
  Endpoint peers_;
  const GpuPtr gpu_;
  Library library_;
};

}  // namespace ringtrain
