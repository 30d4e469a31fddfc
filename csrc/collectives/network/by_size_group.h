// Two ways over the same ranks: one for what is small and waits for latency, another for what is large and waits for
// bandwidth.
#pragma once

#include <memory>

#include "collectives/group.h"

namespace ringtrain {

class BySizeGroup final : public Group {
 public:
  // Reductions are large from one number of bytes on, which all ranks may change between operations, what only moves
  // data from another.
  struct Limits {
    const size_t* reduce_bytes;  // outlives the Group
    size_t move_bytes;
  };
  // Decides by numbers that all ranks know alike: the bytes of the whole result. Shared with requests of MPI that a
  // contest may have left under way.
  BySizeGroup(std::shared_ptr<Group> small, std::shared_ptr<Group> large, const Limits& large_from);
  const char* name() const override { return "by size"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override { small_->barrier(); }

 private:
  Group& choose(const Reduction& reduction, size_t count);
  Group& choose(size_t bytes) { return bytes >= large_from_.move_bytes ? *large_ : *small_; }

  const std::shared_ptr<Group> small_, large_;
  const Limits large_from_;
};

}  // namespace ringtrain
