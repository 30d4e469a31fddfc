// Two ways over the same ranks: NCCL for what it can do, another for the rest.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "collectives/delegating_group.h"
#include "collectives/gpu/nccl_group.h"

namespace ringtrain {

class EitherGroup final : public DelegatingGroup {
 public:
  // `first` takes what NCCL can do, and all that only moves data.
  EitherGroup(std::unique_ptr<Group> first, std::unique_ptr<Group> rest)
      : DelegatingGroup(std::move(first)), rest_(std::move(rest)) {}
  const char* name() const override { return other().name(); }
  bool keeps_nan() const override { return other().keeps_nan(); }

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

 private:
  Group& choose(const Reduction& reduction) { return NcclGroup::can(reduction) ? other() : *rest_; }

  const std::unique_ptr<Group> rest_;
};

}  // namespace ringtrain
