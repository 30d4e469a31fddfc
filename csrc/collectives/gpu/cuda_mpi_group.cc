#include "collectives/gpu/cuda_mpi_group.h"

#include <utility>

namespace ringtrain {

CudaMpiGroup::CudaMpiGroup(Endpoint peers, GpuPtr gpu, std::unique_ptr<Group> fallback)
    : GroupWithFallback(std::move(fallback)), peers_(std::move(peers)), gpu_(std::move(gpu)), library_(peers_) {}

void CudaMpiGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  if (reduction.scale != 1.0 || is_half(reduction.dtype) || !Library::can(reduction))
    return fallback().allreduce(reduction, pieces);
  const size_t element = size_of(reduction.dtype);
  for (const Piece& piece : pieces) gpu_->copy(piece.destination, piece.source, piece.count * element, gpu_->stream());
  gpu_->wait(*gpu_->record(gpu_->stream()), peers_.watch());
  for (const Piece& piece : pieces) library_.allreduce_in_place(reduction, piece.destination, piece.count);
}

}  // namespace ringtrain
