// A Group with an allreduce of its own, which leaves all else to another Group of the same ranks.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

class DelegatingGroup : public Group {
 public:
  explicit DelegatingGroup(std::unique_ptr<Group> rest) : Group(rest->rank(), rest->size()), rest_(std::move(rest)) {}

  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) final {
    rest_->reduce_scatter(reduction, source, destination, counts);
  }
  void allgather(const void* source, void* destination, const Counts& bytes) final {
    rest_->allgather(source, destination, bytes);
  }
  void broadcast(void* data, size_t bytes, int root) final { rest_->broadcast(data, bytes, root); }
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) final {
    rest_->alltoall(source, send_bytes, destination, receive_bytes);
  }
  void barrier() final { rest_->barrier(); }

 protected:
  Group& rest() { return *rest_; }

 private:
  const std::unique_ptr<Group> rest_;
};

}  // namespace ringtrain
