// Ranks whose GPUs NCCL connects. All memory lies on the GPU; every method puts its work into the GPU's own stream and
// returns, usually before it is done.
//
// NCCL makes its connections when something is done for the first time, and waits for the other ranks with that. So
// what is new (another method, another order of magnitude) is called on a thread of its own while this one keeps its
// Watch; what has been done before is called at once.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "collectives/group.h"
#include "collectives/nccl_buffer.h"
#include "fabric/gpu_memory.h"
#include "fabric/nccl.h"
#include "fabric/nccl_memory.h"
#include "fabric/watch.h"

namespace ringtrain {

class NcclGroup final : public Group {
 public:
  // All ranks at the same time. `watch` outlives this.
  NcclGroup(std::shared_ptr<NcclComm> comm, std::shared_ptr<GpuPool> pool, std::shared_ptr<NcclMemory> memory,
            Watch& watch);
  const char* name() const override { return "nccl"; }
  bool keeps_nan() const override { return false; }
  NcclComm& comm() { return *comm_; }

  // Whether NCCL can do it: it lacks 16-bit integers, and knows factors for sums of floats only.
  static bool can(const Reduction& reduction);

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

  // Pieces of fewer bytes are packed into one array; what packing_contest.h has measured.
  void pack_below(size_t bytes) { pack_below_bytes_ = bytes; }

 private:
  enum class Kind : uint64_t { allreduce, reduce_scatter, allgather, broadcast };
  // `call` owns all that it uses, and returns NCCL's code.
  template <typename Call>
  void enqueue(Kind kind, size_t bytes, const char* name, Call call);
  template <typename Call>
  void enqueue_apart(const char* name, Call call);

  const std::shared_ptr<NcclComm> comm_;
  const std::shared_ptr<GpuPool> pool_;
  const std::shared_ptr<NcclMemory> memory_;  // of the user's arrays
  Watch& watch_;
  NcclBuffer packed_;
  size_t pack_below_bytes_ = 0;
  std::set<uint64_t> done_before_;
};

}  // namespace ringtrain
