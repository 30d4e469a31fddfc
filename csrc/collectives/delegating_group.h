// A Group with reductions of its own, which leaves all else to another Group of the same ranks.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

class DelegatingGroup : public Group {
 public:
  explicit DelegatingGroup(std::unique_ptr<Group> other)
      : Group(other->rank(), other->size()), other_(std::move(other)) {}

  void reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                      const Counts& counts) override {
    other_->reduce_scatter(reduction, source, destination, counts);
  }
  void allgather(const void* source, void* destination, const Counts& bytes) final {
    other_->allgather(source, destination, bytes);
  }
  void broadcast(void* data, size_t bytes, int root) final { other_->broadcast(data, bytes, root); }
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) final {
    other_->alltoall(source, send_bytes, destination, receive_bytes);
  }
  void barrier() final { other_->barrier(); }

 protected:
  Group& other() const { return *other_; }

 private:
  const std::unique_ptr<Group> other_;
};

}  // namespace ringtrain
