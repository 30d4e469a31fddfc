// A reduce-scatter over several nodes: on each node the ranks of a place reduce what their lane's ranks will own, and
// the lane reduces and divides it. 16-bit floats are widened on the way into the node, and rounded at the end.
#include <algorithm>

#include "collectives/network/hierarchical_group.h"
#include "collectives/network/node_runs.h"

namespace ringtrain {

void HierarchicalGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                                       const Counts& counts) {
  if (!parts_.is_even()) return fallback().reduce_scatter(reduction, source, destination, counts);
  const bool is_wide = is_half(reduction.dtype);
  const DType dtype = is_wide ? DType::float32 : reduction.dtype;
  const size_t given = size_of(reduction.dtype), element = size_of(dtype);
  const Counts own_lane = parts_.of_own_lane(counts), offsets = offsets_of(counts);
  const auto part_of = [&](size_t rank) { return static_cast<const char*>(source) + offsets[rank] * given; };

  char* of_node = own_lane_.get(total_of(own_lane) * element);
  char* next = of_node;
  for_each_run(parts_.ranks, counts, [&](const NodeRun& run) {
    const void* by_lane = part_of(run.first_rank());
    if (is_wide || !run.is_in_order()) {
      char* copy = run_.get(total_of(run.lanes()) * element);
      by_lane = copy;
      run.for_each([&](size_t rank) {
        if (is_wide)
          widen(reduction.dtype, reinterpret_cast<float*>(copy), part_of(rank), counts[rank]);
        else
          std::copy_n(part_of(rank), counts[rank] * element, copy);
        copy += counts[rank] * element;
      });
    }
    parts_.node->reduce_scatter({dtype, reduction.reduce}, by_lane, next, run.lanes());
    next += run.lanes()[parts_.place()] * element;
  });
  if (!is_wide) return parts_.cross->reduce_scatter(reduction, of_node, destination, own_lane);
  const size_t count = own_lane[static_cast<size_t>(parts_.own_node)];
  auto* sums = reinterpret_cast<float*>(run_.get(count * element));
  parts_.cross->reduce_scatter({dtype, reduction.reduce}, of_node, sums, own_lane);
  narrow(reduction.dtype, reduction.scale, destination, sums, count);
}

}  // namespace ringtrain
