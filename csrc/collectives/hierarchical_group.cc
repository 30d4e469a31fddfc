#include "collectives/hierarchical_group.h"

namespace ringtrain {

HierarchicalGroup::HierarchicalGroup(std::unique_ptr<Group> node, std::unique_ptr<Group> cross,
                                     std::unique_ptr<Group> flat)
    : FlatGroup(flat->rank(), flat->size()), node_(std::move(node)), cross_(std::move(cross)), flat_(std::move(flat)) {}

void HierarchicalGroup::allreduce_in_place(const Reduction& reduction, void* data, size_t count) {
  if (is_half(reduction.dtype)) {  // the sums of the nodes would be rounded, or overflow, on their way
    auto* wide = reinterpret_cast<float*>(wide_.get(count * sizeof(float)));
    widen(reduction.dtype, wide, data, count);
    allreduce_in_place({DType::float32, reduction.reduce, 1.0}, wide, count);
    return narrow(reduction.dtype, reduction.scale, data, wide, count);
  }
  const Counts counts = even_slices(count, node_->size());
  const Counts bytes = in_bytes(counts, size_of(reduction.dtype));
  const size_t own = static_cast<size_t>(node_->rank());
  char* slice = static_cast<char*>(data) + offsets_of(bytes)[own];
  node_->reduce_scatter({reduction.dtype, reduction.reduce, 1.0}, data, slice, counts);
  cross_->allreduce(reduction, {{slice, slice, counts[own]}});
  node_->allgather(slice, data, bytes);
}

void HierarchicalGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                                       const Counts& counts) {
  flat_->reduce_scatter(reduction, source, destination, counts);
}

void HierarchicalGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  flat_->allgather(source, destination, bytes);
}

void HierarchicalGroup::broadcast(void* data, size_t bytes, int root) { flat_->broadcast(data, bytes, root); }

void HierarchicalGroup::alltoall(const void* source, const Counts& send_bytes, void* destination,
                                 const Counts& receive_bytes) {
  flat_->alltoall(source, send_bytes, destination, receive_bytes);
}

void HierarchicalGroup::barrier() { flat_->barrier(); }

}  // namespace ringtrain
