// A Group of one rank: so that nobody has to ask whether the job is distributed.
#pragma once

#include "collectives/group.h"

namespace ringtrain {

class SelfGroup final : public Group {
 public:
  SelfGroup() : Group(0, 1) {}
  const char* name() const override { return "self"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void*, size_t, int) override {}
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts&) override;
  void barrier() override {}
};

}  // namespace ringtrain
