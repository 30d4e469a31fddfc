// Ranks whose GPUs NCCL connects. All memory lies on the GPU; every method puts its work into the GPU's own stream and
// returns, usually before it is done.
//
// NCCL makes its connections when something is done for the first time, and waits for the other ranks with that. So
// what is new (another method, another order of magnitude) is called on a thread of its own while this one keeps its
// Watch; what has been done before is called at once.
#pragma once

#include <memory>
#include <set>
#include <tuple>
#include <utility>
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
  void allreduce_in_arena(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

  // Pieces of fewer bytes are packed into one array; what packing_contest.h has measured.
  void pack_below(size_t bytes) { pack_below_bytes_ = bytes; }
  // Where they are packed; to be prepared on all ranks or on none.
  NcclBuffer& packed() { return packed_; }

 private:
  enum class Kind { allreduce, reduce_scatter, allgather, broadcast };
  // What NCCL chooses its ways by, and makes connections for.
  struct Use {
    Kind kind;
    size_t arrays;
    size_t bytes;    // in all
    size_t largest;  // of one array
    Reduction reduction;
    bool is_registered, is_even;

    // Equal for what NCCL does the same way.
    std::tuple<Kind, int, int, DType, Reduce, bool, bool, bool> key() const;
  };
  // `call` owns all that it uses, and returns NCCL's code.
  template <typename Call>
  void enqueue(const Use& use, const char* name, Call call);
  template <typename Call>
  void enqueue_apart(const char* name, Call call);
  void reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays, bool is_registered);

  // NCCL may work in memory that it knows if it does so on all ranks. Where the others may have something else, it gets
  // a block instead: with the values of `source`, or for those of `destination`, which deliver() then copies.
  using Blocks = std::vector<GpuBlockPtr>;
  const void* readable(const void* source, size_t bytes, Blocks& blocks);
  void* writable(void* destination, size_t bytes, Blocks& blocks);
  void deliver(void* destination, const void* written, size_t bytes);

  const std::shared_ptr<NcclComm> comm_;
  const std::shared_ptr<GpuPool> pool_;
  const std::shared_ptr<NcclMemory> memory_;  // of the user's arrays
  Watch& watch_;
  NcclBuffer packed_;
  size_t pack_below_bytes_ = 0;
  std::set<decltype(std::declval<Use>().key())> done_before_;
};

}  // namespace ringtrain
