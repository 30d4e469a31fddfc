// A Group that does some of its operations itself, and leaves all else to another Group of the same ranks.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

class GroupWithFallback : public Group {
 public:
  explicit GroupWithFallback(std::shared_ptr<Group> fallback)
      : Group(fallback->rank(), fallback->size()), fallback_(std::move(fallback)) {}

  void reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                      const Counts& counts) override {
    fallback_->reduce_scatter(reduction, source, destination, counts);
  }
  void allgather(const void* source, void* destination, const Counts& bytes) override {
    fallback_->allgather(source, destination, bytes);
  }
  void allgather_all(const std::vector<Gathering>& arrays) override { fallback_->allgather_all(arrays); }
  void broadcast(void* data, size_t bytes, int root) override { fallback_->broadcast(data, bytes, root); }
  void broadcast_all(const std::vector<Piece>& pieces, int root) override { fallback_->broadcast_all(pieces, root); }
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override {
    fallback_->alltoall(source, send_bytes, destination, receive_bytes);
  }
  void barrier() override { fallback_->barrier(); }

 protected:
  Group& fallback() const { return *fallback_; }

 private:
  const std::shared_ptr<Group> fallback_;
};

}  // namespace ringtrain
