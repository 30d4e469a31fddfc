#include "collectives/network/library.h"

#include "kernels/copy.h"

namespace ringtrain {
namespace {

LibraryCollectives& collectives_of(const Endpoint& peers) {
  LibraryCollectives* const collectives = peers.network().collectives();
  if (!collectives)
    throw invalid(
        "allreduce_algorithm=mpi, cross_algorithm=mpi and gpu_cross_algorithm=cuda_aware_mpi need MPI, and this job "
        "runs over sockets (network=sockets)");
  return *collectives;
}

}  // namespace

Library::Library(Endpoint& peers)
    : peers_(peers), communicator_(collectives_of(peers).connect(peers.ranks(), peers.tag(), peers.watch())) {}

void Library::allreduce(const Reduction& reduction, const Piece& array) {
  if (is_half(reduction.dtype)) {
    auto* wide = reinterpret_cast<float*>(wide_.get(array.count * sizeof(float)));
    widen(reduction.dtype, wide, array.source, array.count);
    allreduce_in_place({DType::float32, reduction.reduce}, wide, array.count);
    return narrow(reduction.dtype, reduction.scale, array.destination, wide, array.count);
  }
  copy(array.destination, array.source, array.count * size_of(reduction.dtype));
  allreduce_in_place(reduction, array.destination, array.count);
  if (reduction.scale != 1.0)
    scale(reduction.dtype, reduction.scale, array.destination, array.destination, array.count);
}

void Library::allreduce_in_place(const Reduction& reduction, void* data, size_t count) {
  constexpr size_t kMostPerCall = 1 << 30;  // elements, below the largest int
  for_each_part(count, kMostPerCall, [&](size_t begin, size_t length) {
    char* first = static_cast<char*>(data) + begin * size_of(reduction.dtype);
    peers_.wait(communicator_->iallreduce(first, static_cast<int>(length), reduction.dtype, reduction.reduce));
  });
}

}  // namespace ringtrain
