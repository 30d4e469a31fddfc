#include "collectives/choose.h"

#include <algorithm>
#include <limits>

#include "collectives/network/by_size_group.h"
#include "collectives/network/contest.h"
#include "collectives/network/doubling_group.h"
#include "collectives/network/hierarchical_group.h"
#include "collectives/network/mpi_group.h"
#include "collectives/network/ring_group.h"
#include "collectives/self_group.h"

namespace ringtrain {
namespace {

// Between ranks that share no memory, an array is reduced by doubling below kHalveFromBytes, by halving and doubling
// below the option ring_from_kb, and in a ring from there on: steps cost latency, and there are fewest in the first;
// bytes cost bandwidth, and the first sends log2(n) / 2 times as many.
constexpr size_t kHalveFromBytes = 64 << 10;
// What only moves data is never left to MPI from here on: its counts are int, and a large MPI_Iallgatherv of Intel MPI
// 2021.18 never ends unless it is tested all the time.
constexpr size_t kMoveFromBytes = 64 << 10;
constexpr size_t kNever = std::numeric_limits<size_t>::max();

std::unique_ptr<Group> make_node_group(const Placement& placement, const Tuning& tuning, NodeMemory memory,
                                       Watch& watch) {
  if (placement.on_node(placement.own_node()).size() == 1) return std::make_unique<SelfGroup>();
  return std::make_unique<ShmGroup>(std::move(memory), placement.place_on_node(), tuning, watch);
}

}  // namespace

std::unique_ptr<Group> make_network_group(const std::string& algorithm, const Peers& peers, const Tuning& tuning) {
  if (peers.size() == 1) return std::make_unique<SelfGroup>();
  if (algorithm == "ring") return std::make_unique<RingGroup>(peers, tuning);
  const auto large = std::make_shared<RingGroup>(peers, tuning);
  const auto make_library = [&] { return std::make_unique<MpiGroup>(peers); };
  std::shared_ptr<Group> small = std::make_shared<DoublingGroup>(
      peers, make_library(), DoublingGroup::Limits{kHalveFromBytes, tuning.ring_chunk_bytes});
  BySizeGroup::Limits large_from = {&tuning.ring_from_bytes, kMoveFromBytes};
  if (algorithm == "doubling" || algorithm == "mpi") large_from.reduce_bytes = &kNever;
  if (algorithm == "mpi") small = make_library();
  if (algorithm == "measured") {
    constexpr size_t kSmallBytes = 4 << 10, kLargeBytes = 512 << 10;
    const std::shared_ptr<Group> library = make_library();
    if (is_clearly_faster(library, large, kLargeBytes, peers.mpi())) large_from.reduce_bytes = &kNever;
    if (large_from.reduce_bytes == &kNever || is_clearly_faster(library, small, kSmallBytes, peers.mpi()))
      small = library;
  }
  return std::make_unique<BySizeGroup>(std::move(small), large, large_from);
}

bool wants_shared_memory(const Placement& placement, const Options& options) {
  const bool is_free = options.allreduce_algorithm == "auto" || options.allreduce_algorithm == "measured";
  return options.shared_memory == "auto" && is_free && placement.distinct_nodes().size() < placement.ranks.size();
}

std::unique_ptr<Group> choose_group(const Placement& placement, const Options& options, const Tuning& tuning, Mpi* mpi,
                                    int tag, NodeMemory memory, Watch& watch) {
  if (placement.ranks.size() == 1) return std::make_unique<SelfGroup>();
  if (memory.mailboxes.data() && placement.is_on_one_node())
    return make_node_group(placement, tuning, std::move(memory), watch);
  std::unique_ptr<Group> flat =
      make_network_group(options.allreduce_algorithm, Peers(*mpi, placement.ranks, placement.own, tag, watch), tuning);
  if (!memory.mailboxes.data()) return flat;

  HierarchicalGroup::Parts parts;
  parts.watch = std::make_unique<StreamWatch>(watch);
  parts.node = make_node_group(placement, tuning, std::move(memory), *parts.watch);
  parts.flat = std::move(flat);
  parts.nodes = static_cast<int>(placement.distinct_nodes().size());
  parts.lanes = placement.fewest_ranks_on_a_node();
  parts.may_overlap = options.cross_algorithm != "mpi";
  if (placement.place_on_node() < parts.lanes) {
    std::vector<int> cross;  // who has this rank's place on each node
    for (const int distinct : placement.distinct_nodes())
      cross.push_back(placement.ranks[placement.on_node(distinct)[placement.place_on_node()]]);
    const auto own =
        static_cast<int>(std::find(cross.begin(), cross.end(), placement.ranks[placement.own]) - cross.begin());
    const Peers peers(*mpi, cross, own, tag, watch);
    if (parts.may_overlap) parts.ring = std::make_unique<RingGroup>(peers, tuning);
    parts.cross = make_network_group(options.cross_algorithm, peers, tuning);
  }
  return std::make_unique<HierarchicalGroup>(std::move(parts));
}

}  // namespace ringtrain
