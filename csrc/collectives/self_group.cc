#include "collectives/self_group.h"

#include <cstring>

namespace ringtrain {

void SelfGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  for (const Piece& piece : pieces) reduce_scatter(reduction, piece.source, piece.destination, {piece.count});
}

void SelfGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                               const Counts& counts) {
  if (source == destination && reduction.scale == 1.0) return;
  reduce(reduction, &destination, 1, &source, 1, counts[0]);
}

void SelfGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  if (source != destination && bytes[0] > 0) std::memcpy(destination, source, bytes[0]);
}

void SelfGroup::alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts&) {
  allgather(source, destination, send_bytes);
}

}  // namespace ringtrain
