// Ranks anywhere, through MPI's own collectives: the vendor knows its network.
//
// Only non-blocking calls are used and tested for completion, since the blocking ones of the usual libraries spin.
// 16-bit floats, which MPI cannot add, travel as float32. Counts that do not fit MPI's int are split, or left to the
// ring.
#pragma once

#include <vector>

#include "collectives/network/flat_group.h"
#include "collectives/network/peers.h"

namespace ringtrain {

class MpiGroup final : public FlatGroup {
 public:
  // All of them construct it at the same time.
  explicit MpiGroup(Peers peers);
  const char* name() const override { return "mpi"; }
  bool keeps_nan() const override { return false; }  // MPI leaves it open

  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  // Less than 2^31 bytes altogether.
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  // Less than 2^31 bytes in each direction.
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

 private:
  void reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) override;
  void allreduce_in_place(const Reduction& reduction, void* data, size_t count);
  void complete(MpiRequest request);

  Peers peers_;
  Mpi& mpi_;
  const MpiCommunicator communicator_;
  Scratch wide_, whole_;
  std::vector<int> counts_, offsets_, receive_counts_, receive_offsets_;  // MPI reads them while a call is under way
};

}  // namespace ringtrain
