// Ranks anywhere, through MPI's own collectives: the vendor knows its network.
//
// Only non-blocking calls are used and tested for completion, since the blocking ones of the usual libraries spin.
// 16-bit floats, which MPI cannot add, travel as float32. Counts that do not fit MPI's int are split, or left to the
// ring.
#pragma once

#include <memory>
#include <vector>

#include "collectives/flat_group.h"
#include "fabric/mpi.h"
#include "fabric/wait.h"

namespace ringtrain {

class MpiGroup final : public FlatGroup {
 public:
  // `ranks` are ranks of mpi.world(); all of them construct it at the same time. `mpi` and `watch` outlive this.
  MpiGroup(Mpi& mpi, const std::vector<int>& ranks, int rank, int tag, Watch& watch);
  ~MpiGroup() override;
  const char* name() const override { return "mpi"; }

  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  // Less than 2^31 bytes altogether.
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  // Less than 2^31 bytes in each direction.
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;

 private:
  void allreduce_in_place(const Reduction& reduction, void* data, size_t count) override;
  void complete(MpiRequest request);
  void give_up();

  Mpi& mpi_;
  MpiComm communicator_;
  Watch& watch_;
  Waiter waiter_;
  Scratch wide_, whole_;
  // What MPI reads while a call is under way.
  struct Arguments {
    std::vector<int> counts, offsets, receive_counts, receive_offsets;
  };
  std::unique_ptr<Arguments> arguments_ = std::make_unique<Arguments>();
  bool is_given_up_ = false;
};

}  // namespace ringtrain
