#include "collectives/network/hierarchical_group.h"

#include "collectives/network/hierarchical_allreduce.h"
#include "collectives/network/packing.h"

namespace ringtrain {
namespace {

// Below, the stages are so short that blocks would only add messages.
constexpr size_t kOverlapFromBytes = 256 << 10;

Reduction unscaled(const Reduction& reduction, DType dtype) { return {dtype, reduction.reduce, 1.0}; }

}  // namespace

Counts HierarchicalGroup::Parts::lane_counts(size_t count) const {
  Counts counts = even_slices(count, lanes);
  counts.resize(static_cast<size_t>(node->size()));
  return counts;
}

void HierarchicalGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  reduce_packed(pieces, size_of(reduction.dtype), packed_,
                [&](const std::vector<Piece>& arrays) { reduce_arrays(reduction, arrays); });
}

void HierarchicalGroup::reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) {
  const size_t element = size_of(reduction.dtype);
  size_t count = 0;
  for (const Piece& array : arrays) count += array.count;
  if (parts_.may_overlap && count * element >= kOverlapFromBytes)
    return HierarchicalAllreduce(parts_, reduction, arrays, {wide_, wide_slices_}).run();
  for (const Piece& array : arrays) reduce_array(reduction, array);
}

void HierarchicalGroup::reduce_array(const Reduction& reduction, const Piece& array) {
  if (is_half(reduction.dtype)) {  // the sums of the nodes would be rounded, or overflow, on their way
    auto* wide = reinterpret_cast<float*>(wide_.get(array.count * sizeof(float)));
    widen(reduction.dtype, wide, array.source, array.count);
    reduce_array(unscaled(reduction, DType::float32), {wide, wide, array.count});
    return narrow(reduction.dtype, reduction.scale, array.destination, wide, array.count);
  }
  const Counts counts = parts_.lane_counts(array.count);
  const Counts bytes = in_bytes(counts, size_of(reduction.dtype));
  char* slice = static_cast<char*>(array.destination) + offsets_of(bytes)[parts_.place()];
  parts_.node->reduce_scatter(unscaled(reduction, reduction.dtype), array.source, slice, counts);
  if (parts_.cross) parts_.cross->allreduce(reduction, {{slice, slice, counts[parts_.place()]}});
  parts_.node->allgather(slice, array.destination, bytes);
}

void HierarchicalGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                                       const Counts& counts) {
  parts_.flat->reduce_scatter(reduction, source, destination, counts);
}

void HierarchicalGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  parts_.flat->allgather(source, destination, bytes);
}

void HierarchicalGroup::broadcast(void* data, size_t bytes, int root) { parts_.flat->broadcast(data, bytes, root); }

void HierarchicalGroup::alltoall(const void* source, const Counts& send_bytes, void* destination,
                                 const Counts& receive_bytes) {
  parts_.flat->alltoall(source, send_bytes, destination, receive_bytes);
}

void HierarchicalGroup::barrier() { parts_.flat->barrier(); }

}  // namespace ringtrain
