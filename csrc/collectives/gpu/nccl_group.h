// Ranks whose GPUs NCCL connects. All memory is on the GPU; every method puts its work into the GPU's own stream and
// returns, usually before it is done.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/gpu/staged_group.h"
#include "collectives/group.h"
#include "gpu/nccl_comm.h"
#include "memory/gpu_memory.h"

namespace ringtrain {

// Memory on the GPU in which a NcclGroup packs what is small. NCCL knows it ("registered"), so that it may send from it
// without copying, where the library can.
//
// Requires Engine::turn_.
class NcclBuffer {
 public:
  // Both outlive this.
  NcclBuffer(NcclComm& comm, GpuPool& pool) : comm_(comm), pool_(pool) {}
  ~NcclBuffer();

  // Takes memory that NCCL knows; whether there is some. NCCL needs such memory on all ranks or on none, so a rank that
  // has some drops it where another has none.
  bool prepare();
  void drop();

  // At least `bytes`, for what is put into the GPU's own stream from now on; what was there before may be gone. Whether
  // NCCL knows it depends on the bytes alone.
  char* get(size_t bytes);

 private:
  NcclComm& comm_;
  GpuPool& pool_;
  void* memory_ = nullptr;  // of ncclMemAlloc
  void* registration_ = nullptr;
  GpuBlockPtr block_;  // where that is too small, or there is none
};

class NcclGroup final : public Group {
 public:
  // `key`: under which `memory`, that of the user's arrays, notes what is known of it here.
  NcclGroup(std::shared_ptr<NcclComm> comm, std::shared_ptr<GpuPool> pool, std::shared_ptr<NcclMemory> memory, int key);
  ~NcclGroup() override;
  const char* name() const override { return "nccl"; }

  // Reductions that NCCL cannot do are left to another Group of the same ranks. There are none without one.
  void set_fallback(std::unique_ptr<Group> fallback) { fallback_ = std::move(fallback); }
  // Whether NCCL can do it: it lacks 16-bit integers, and knows factors for sums of floats only.
  static bool can(const Reduction& reduction);

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void allreduce_registered(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

  // Tries whether small pieces are better packed together here: copies on the GPU against more operations in one call.
  // All ranks at the same time.
  void probe_packing(Watch& watch);
  // Where they are packed; to be prepared on all ranks or on none.
  NcclBuffer& packed() { return packed_; }

 private:
  // `call` puts so many arrays into the stream. It owns all that it uses, and returns NCCL's code.
  void enqueue(const char* name, size_t arrays, std::function<int()> call);
  void register_new_slabs();
  double seconds_for(const std::vector<Piece>& pieces, double* host, Watch& watch);
  void reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays);

  // NCCL may work in memory that it knows if it does so on all ranks. Where the others may have something else, it gets
  // a block instead: with the values of `source`, or for those of `destination`, which deliver() then copies.
  using GpuBlocks = std::vector<GpuBlockPtr>;
  const void* readable(const void* source, size_t bytes, GpuBlocks& blocks);
  void* writable(void* destination, size_t bytes, GpuBlocks& blocks);
  void deliver(void* destination, const void* written, size_t bytes);

  const std::shared_ptr<NcclComm> comm_;
  const std::shared_ptr<GpuPool> pool_;
  const std::shared_ptr<NcclMemory> memory_;
  const int key_;
  std::unique_ptr<Group> fallback_;
  std::vector<void*> registrations_;  // of its slabs, in their order
  NcclBuffer packed_;
  size_t pack_below_bytes_ = 0;  // pieces of fewer bytes are packed into one array
};

// GPUs on several nodes: NCCL inside a node, anything else between the nodes.
//
// As HierarchicalGroup, whose stages in shared memory these are not: a value is reduced to its owner on the node,
// between the owners of the same place on all nodes, and gathered on the node. All of it in the order of the GPU's own
// stream.
class GpuHierarchy final : public StagedGroup {
 public:
  struct Parts {
    std::unique_ptr<Group> node;   // the ranks of this node
    std::unique_ptr<Group> cross;  // those with this rank's place on every node; null when it owns nothing
    int owners = 0;                // ranks of a node that own something
  };
  // `host`: all ranks, for what has no hierarchical form, or NCCL cannot do. `relay` outlives this.
  GpuHierarchy(Parts parts, std::shared_ptr<Group> host, Relay& relay, std::shared_ptr<GpuPool> pool)
      : StagedGroup(std::move(host), relay, false), parts_(std::move(parts)), pool_(std::move(pool)) {}
  const char* name() const override { return "nccl on nodes"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;

 private:
  // Of so many elements that the slices of its owners are equal.
  void allreduce_array(const Reduction& reduction, const Piece& piece);

  const Parts parts_;
  const std::shared_ptr<GpuPool> pool_;
};

}  // namespace ringtrain
