// A Group of one rank: so that nobody has to ask whether the job is distributed.
#pragma once

#include <vector>

#include "collectives/group.h"
#include "kernels/copy.h"

namespace ringtrain {

class SelfGroup final : public Group {
 public:
  SelfGroup() : Group(0, 1) {}
  const char* name() const override { return "self"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override {
    for (const Piece& piece : pieces) reduce_scatter(reduction, piece.source, piece.destination, {piece.count});
  }
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                      const Counts& counts) override {
    if (source == destination && reduction.scale == 1.0) return;
    reduce(reduction, &destination, 1, &source, 1, counts[0]);
  }
  void allgather(const void* source, void* destination, const Counts& bytes) override {
    copy(destination, source, bytes[0]);
  }
  void broadcast(void*, size_t, int) override {}
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts&) override {
    allgather(source, destination, send_bytes);
  }
  void barrier() override {}
};

}  // namespace ringtrain
