// An allgather over several nodes: each lane gathers what its own ranks have, and a node's ranks tell each other what
// their lanes have gathered.
#include <algorithm>

#include "collectives/network/hierarchical_group.h"
#include "collectives/network/node_runs.h"
#include "collectives/network/packing.h"
#include "kernels/copy.h"

namespace ringtrain {

void HierarchicalGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  if (!parts_.is_even()) return fallback().allgather(source, destination, bytes);
  const Counts own_lane = parts_.of_own_lane(bytes), offsets = offsets_of(bytes);
  char* own = own_lane_.get(total_of(own_lane));
  parts_.cross->allgather(source, own, own_lane);
  for_each_run(parts_.ranks, bytes, [&](const NodeRun& run) {
    const bool is_in_order = run.is_in_order();
    char* there = static_cast<char*>(destination);
    char* gathered = is_in_order ? there + offsets[run.first_rank()] : run_.get(total_of(run.lanes()));
    parts_.node->allgather(own, gathered, run.lanes());
    own += run.lanes()[parts_.place()];
    if (is_in_order) return;
    run.for_each([&](size_t rank) {
      copy(there + offsets[rank], gathered, bytes[rank]);
      gathered += bytes[rank];
    });
  });
}

void HierarchicalGroup::allgather_all(const std::vector<Gathering>& arrays) {
  gather_packed(arrays, rank(), packed_,
                [&](const Gathering& array) { allgather(array.source, array.destination, array.bytes); });
}

}  // namespace ringtrain
