#include "collectives/network/by_size_group.h"

namespace ringtrain {

BySizeGroup::BySizeGroup(std::shared_ptr<Group> small, std::shared_ptr<Group> large, const Limits& large_from)
    : Group(small->rank(), small->size()),
      small_(std::move(small)),
      large_(std::move(large)),
      large_from_(large_from) {}

// What may hold NaN goes where it is not lost.
Group& BySizeGroup::choose(const Reduction& reduction, size_t count) {
  const bool may_lose_nan = !small_->keeps_nan() && is_float(reduction.dtype) &&
                            (reduction.reduce == Reduce::min || reduction.reduce == Reduce::max);
  const bool is_large = count * size_of(reduction.dtype) >= *large_from_.reduce_bytes;
  return may_lose_nan || is_large ? *large_ : *small_;
}

void BySizeGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  size_t count = 0;
  for (const Piece& piece : pieces) count += piece.count;
  choose(reduction, count).allreduce(reduction, pieces);
}

void BySizeGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                                 const Counts& counts) {
  choose(reduction, total_of(counts)).reduce_scatter(reduction, source, destination, counts);
}

void BySizeGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  choose(total_of(bytes)).allgather(source, destination, bytes);
}

void BySizeGroup::broadcast(void* data, size_t bytes, int root) { choose(bytes).broadcast(data, bytes, root); }

void BySizeGroup::alltoall(const void* source, const Counts& send_bytes, void* destination,
                           const Counts& receive_bytes) {
  // What one rank sends and receives, the others do not know.
  large_->alltoall(source, send_bytes, destination, receive_bytes);
}

}  // namespace ringtrain
