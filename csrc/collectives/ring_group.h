// Ranks anywhere, in a ring over MPI point-to-point messages: uses every link in both directions all the time.
#pragma once

#include "collectives/flat_group.h"
#include "collectives/flow.h"
#include "fabric/wait.h"

namespace ringtrain {

class RingGroup final : public FlatGroup {
 public:
  // `ranks` are ranks of mpi.world(), in the order of the ring; `tag` keeps this Group's messages apart. Nothing is
  // sent here. `mpi` and `watch` outlive this.
  RingGroup(Mpi& mpi, std::vector<int> ranks, int rank, int tag, size_t chunk_bytes, Watch& watch);
  const char* name() const override { return "ring"; }

  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

 private:
  void allreduce_in_place(const Reduction& reduction, void* data, size_t count) override;

  // The reduction of slice `rank() + shift` of `data` ends up in its place; the other slices hold partial sums.
  void reduce_slices(const Reduction& reduction, char* data, const Counts& counts, int shift);
  // The same for 16-bit floats: sent as they are to who sums them in float32, so rounded only once.
  void reduce_half_slices(const Reduction& reduction, char* data, const Counts& counts, int shift);
  // Everybody has slice `rank() + shift`; afterwards all have all.
  void gather_slices(char* data, const Counts& bytes, int shift);

  void run(Messages& messages, int to, int from);
  int wrap(int rank) const { return ((rank % size()) + size()) % size(); }
  size_t chunk_elements(DType dtype) const;

  Mpi& mpi_;
  const std::vector<int> ranks_;
  const int tag_;
  const size_t chunk_bytes_;
  Watch& watch_;
  Waiter waiter_;
  Scratch incoming_, whole_;
};

}  // namespace ringtrain
