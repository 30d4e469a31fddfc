// A Group of host memory doing its work for memory on a GPU: where NCCL cannot go, the values pass through the host a
// part at a time.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "collectives/gpu/relay.h"
#include "collectives/group.h"

namespace ringtrain {

class StagedGroup final : public Group {
 public:
  // `host` does the work. `use_arena`, the same on all ranks: the relay's memory lies in the Arena everywhere. `relay`
  // outlives this.
  StagedGroup(std::shared_ptr<Group> host, Relay& relay, bool use_arena)
      : Group(host->rank(), host->size()),
        host_(std::move(host)),
        relay_(relay),
        gpu_(relay.gpu()),
        use_arena_(use_arena) {}
  const char* name() const override { return "staged"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override { host_->barrier(); }

 private:
  // Between the GPU and the host: counts[r] bytes for each rank, laid end to end here and `offset` further on there.
  void load(char* slot, const void* source, const Counts& all, const Counts& part, size_t offset) const;
  void store(void* destination, const char* slot, const Counts& all, const Counts& part, size_t offset) const;

  const std::shared_ptr<Group> host_;
  Relay& relay_;
  const Gpu& gpu_;
  const bool use_arena_;
  int64_t parts_ = 0;  // what the ranks agree on in alltoall()
};

}  // namespace ringtrain
