// Two ways over the same ranks: NCCL for what it can do, another for the rest.
#pragma once

#include <memory>
#include <utility>

#include "collectives/nccl_group.h"

namespace ringtrain {

class EitherGroup final : public Group {
 public:
  // `first` takes what NCCL can do, and all that only moves data.
  EitherGroup(std::unique_ptr<Group> first, std::unique_ptr<Group> rest)
      : Group(first->rank(), first->size()), first_(std::move(first)), rest_(std::move(rest)) {}
  const char* name() const override { return first_->name(); }
  bool keeps_nan() const override { return first_->keeps_nan(); }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override {
    choose(reduction).allreduce(reduction, pieces);
  }
  void allreduce_in_arena(const Reduction& reduction, const std::vector<Piece>& pieces) override {
    choose(reduction).allreduce_in_arena(reduction, pieces);
  }
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                      const Counts& counts) override {
    choose(reduction).reduce_scatter(reduction, source, destination, counts);
  }
  void allgather(const void* source, void* destination, const Counts& bytes) override {
    first_->allgather(source, destination, bytes);
  }
  void broadcast(void* data, size_t bytes, int root) override { first_->broadcast(data, bytes, root); }
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override {
    first_->alltoall(source, send_bytes, destination, receive_bytes);
  }
  void barrier() override { first_->barrier(); }

 private:
  Group& choose(const Reduction& reduction) { return NcclGroup::can(reduction) ? *first_ : *rest_; }

  const std::unique_ptr<Group> first_, rest_;
};

}  // namespace ringtrain
