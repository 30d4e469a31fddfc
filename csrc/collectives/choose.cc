#include "collectives/choose.h"

#include <algorithm>
#include <limits>

#include "collectives/by_size_group.h"
#include "collectives/hierarchical_group.h"
#include "collectives/mpi_group.h"
#include "collectives/ring_group.h"
#include "collectives/self_group.h"

namespace ringtrain {
namespace {

// Below, MPI's logarithmic algorithms win by latency; above, the ring by bandwidth. What only moves data is never left
// to MPI above it: its counts are int, and a large MPI_Iallgatherv of Intel MPI 2021.18 never ends unless it is tested
// all the time.
constexpr size_t kRingFromBytes = 64 << 10;

// Between ranks that share no memory: MPI, the ring, or both by size.
std::unique_ptr<Group> make_network_group(const std::string& algorithm, Mpi& mpi, const std::vector<int>& ranks,
                                          int own, int tag, size_t chunk_bytes, Watch& watch) {
  if (ranks.size() == 1) return std::make_unique<SelfGroup>();
  auto ring = [&] { return std::make_unique<RingGroup>(mpi, ranks, own, tag, chunk_bytes, watch); };
  if (algorithm == "ring") return ring();
  auto library = std::make_unique<MpiGroup>(mpi, ranks, own, tag, watch);
  BySizeGroup::Limits ring_from = {kRingFromBytes, kRingFromBytes};
  if (algorithm == "mpi") ring_from.reduce_bytes = std::numeric_limits<size_t>::max();
  return std::make_unique<BySizeGroup>(std::move(library), ring(), ring_from);
}

}  // namespace

std::vector<int> Placement::on_node(int node) const {
  std::vector<int> places;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (nodes[i] == node) places.push_back(static_cast<int>(i));
  return places;
}

int Placement::place_on_node() const {
  const std::vector<int> places = on_node(own_node());
  return static_cast<int>(std::find(places.begin(), places.end(), own) - places.begin());
}

std::vector<int> Placement::distinct_nodes() const {
  std::vector<int> distinct = nodes;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  return distinct;
}

int Placement::ranks_per_node() const {
  const size_t first = on_node(nodes[0]).size();
  for (const int node : distinct_nodes())
    if (on_node(node).size() != first) return 0;
  return static_cast<int>(first);
}

bool wants_shared_memory(const Placement& placement, const Options& options) {
  return options.shared_memory == "auto" && options.allreduce_algorithm == "auto" && placement.ranks_per_node() != 1 &&
         (placement.is_on_one_node() || placement.ranks_per_node() > 1);
}

std::unique_ptr<Group> choose_group(const Placement& placement, const Options& options, const Tuning& tuning, Mpi* mpi,
                                    int tag, NodeMemory memory, Watch& watch) {
  if (placement.ranks.size() == 1) return std::make_unique<SelfGroup>();
  std::unique_ptr<Group> node;
  if (memory.mailboxes.data()) {
    const int size = static_cast<int>(placement.on_node(placement.own_node()).size());
    const auto geometry = ShmGroup::Geometry::of(size, static_cast<size_t>(options.mailbox_kb * 1024), memory.cores);
    node = std::make_unique<ShmGroup>(std::move(memory), geometry, placement.place_on_node(), tuning, watch);
    if (placement.is_on_one_node()) return node;
  }
  const auto chunk_bytes = static_cast<size_t>(options.ring_chunk_kb * 1024);
  std::unique_ptr<Group> flat =
      make_network_group(options.allreduce_algorithm, *mpi, placement.ranks, placement.own, tag, chunk_bytes, watch);
  if (!node) return flat;

  std::vector<int> cross;  // who has this rank's place on each node
  for (const int distinct : placement.distinct_nodes())
    cross.push_back(placement.ranks[placement.on_node(distinct)[placement.place_on_node()]]);
  const auto own = std::find(cross.begin(), cross.end(), placement.ranks[placement.own]) - cross.begin();
  return std::make_unique<HierarchicalGroup>(
      std::move(node),
      make_network_group(options.cross_algorithm, *mpi, cross, static_cast<int>(own), tag, chunk_bytes, watch),
      std::move(flat));
}

}  // namespace ringtrain
