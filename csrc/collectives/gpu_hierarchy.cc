#include "collectives/gpu_hierarchy.h"

namespace ringtrain {

// The factor goes in first, so that 16-bit floats do not overflow on their way. The owners meet once for all pieces.
void GpuHierarchy::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  const Reduction unscaled = {reduction.dtype, reduction.reduce, 1.0};
  const auto place = static_cast<size_t>(parts_.node->rank());
  struct Slices {
    char* own;
    Counts counts, bytes;
  };
  std::vector<Slices> all;
  std::vector<Piece> own;
  for (const Piece& piece : pieces) {
    Counts counts = even_slices(piece.count, parts_.owners);
    counts.resize(static_cast<size_t>(parts_.node->size()));
    const Counts bytes = in_bytes(counts, size_of(reduction.dtype));
    char* slice = static_cast<char*>(piece.destination) + offsets_of(bytes)[place];
    parts_.node->reduce_scatter(reduction, piece.source, slice, counts);
    if (counts[place] > 0) own.push_back({slice, slice, counts[place]});
    all.push_back({slice, std::move(counts), bytes});
  }
  if (parts_.cross) parts_.cross->allreduce(unscaled, own);
  for (size_t i = 0; i < pieces.size(); ++i) parts_.node->allgather(all[i].own, pieces[i].destination, all[i].bytes);
}

}  // namespace ringtrain
