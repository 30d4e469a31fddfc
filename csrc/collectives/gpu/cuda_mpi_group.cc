#include "collectives/gpu/cuda_mpi_group.h"

#include <utility>

#include "collectives/network/blocks.h"

namespace ringtrain {
namespace {

constexpr size_t kMostPerCall = 1 << 30;  // elements, below the largest int

}  // namespace

CudaMpiGroup::CudaMpiGroup(Peers peers, GpuPtr gpu, std::unique_ptr<Group> rest, Watch& watch)
    : DelegatingGroup(std::move(rest)),
      peers_(std::move(peers)),
      gpu_(std::move(gpu)),
      watch_(watch),
      communicator_(peers_.make_communicator()) {}

void CudaMpiGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  if (reduction.scale != 1.0 || is_half(reduction.dtype)) return other().allreduce(reduction, pieces);
  const size_t element = size_of(reduction.dtype);
  for (const Piece& piece : pieces) gpu_->copy(piece.destination, piece.source, piece.count * element, gpu_->stream());
  gpu_->wait(*gpu_->record(gpu_->stream()), watch_);
  for (const Piece& piece : pieces) allreduce_in_place(reduction, static_cast<char*>(piece.destination), piece.count);
}

void CudaMpiGroup::allreduce_in_place(const Reduction& reduction, char* data, size_t count) {
  for_each_part(count, kMostPerCall, [&](size_t begin, size_t length) {
    MpiRequest request = peers_.mpi().iallreduce(data + begin * size_of(reduction.dtype), static_cast<int>(length),
                                                 reduction.dtype, reduction.reduce, communicator_.handle());
    peers_.wait_until([&] { return peers_.mpi().test(request); });
  });
}

}  // namespace ringtrain
