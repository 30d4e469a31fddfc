#include "collectives/by_size_group.h"

namespace ringtrain {

BySizeGroup::BySizeGroup(std::unique_ptr<Group> small, std::unique_ptr<Group> large, size_t large_from_bytes)
    : Group(small->rank(), small->size()),
      small_(std::move(small)),
      large_(std::move(large)),
      large_from_bytes_(large_from_bytes) {}

// MPI leaves it open what the smallest of a number and NaN is, so what has NaN goes where it is NaN.
Group& BySizeGroup::choose(const Reduction& reduction, size_t count) {
  const bool may_lose_nan =
      is_float(reduction.dtype) && (reduction.reduce == Reduce::min || reduction.reduce == Reduce::max);
  return may_lose_nan ? *large_ : choose(count * size_of(reduction.dtype));
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
