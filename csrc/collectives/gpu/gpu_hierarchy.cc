#include "collectives/gpu/gpu_hierarchy.h"

#include <algorithm>

#include "collectives/gpu/nccl_group.h"

namespace ringtrain {

// What cannot be cut into equal slices where it lies is packed first: NCCL is fast with equal ones alone, and every
// call costs as much as copying some hundred kilobytes on the GPU.
void GpuHierarchy::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  if (!NcclGroup::can(reduction)) return fallback().allreduce(reduction, pieces);
  const size_t element = size_of(reduction.dtype), unit = 64 * static_cast<size_t>(parts_.owners);
  size_t total = 0;
  for (const Piece& piece : pieces) total += piece.count;
  if (total == 0) return;
  if (pieces.size() == 1 && total % unit == 0) return allreduce_array(reduction, pieces.front());
  const size_t padded = (total + unit - 1) / unit * unit;
  const GpuBlockPtr block = pool_->take(padded * element);
  char* next = block->data();
  for (const Piece& piece : pieces) {
    gpu_->copy(next, piece.source, piece.count * element, gpu_->stream());
    next += piece.count * element;
  }
  gpu_->clear(next, (padded - total) * element, gpu_->stream());
  allreduce_array(reduction, {block->data(), block->data(), padded});
  next = block->data();
  for (const Piece& piece : pieces) {
    gpu_->copy(piece.destination, next, piece.count * element, gpu_->stream());
    next += piece.count * element;
  }
}

// The factor goes in first, so that 16-bit floats do not overflow on their way.
void GpuHierarchy::allreduce_array(const Reduction& reduction, const Piece& piece) {
  Counts counts = even_slices(piece.count, parts_.owners);
  counts.resize(static_cast<size_t>(parts_.node->size()));
  const Counts bytes = in_bytes(counts, size_of(reduction.dtype));
  const auto place = static_cast<size_t>(parts_.node->rank());
  char* own = static_cast<char*>(piece.destination) + offsets_of(bytes)[place];
  parts_.node->reduce_scatter(reduction, piece.source, own, counts);
  if (parts_.cross) parts_.cross->allreduce({reduction.dtype, reduction.reduce, 1.0}, {{own, own, counts[place]}});
  parts_.node->allgather(own, piece.destination, bytes);
}

}  // namespace ringtrain
