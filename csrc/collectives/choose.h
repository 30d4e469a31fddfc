// Which Group carries out what, by where the ranks are and by what the options force.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/options.h"
#include "base/tuning.h"
#include "collectives/group.h"
#include "collectives/peers.h"
#include "collectives/shm_group.h"
#include "fabric/mpi.h"
#include "fabric/watch.h"

namespace ringtrain {

// The ranks of a process set and where they are.
struct Placement {
  std::vector<int> ranks;  // of the world, ascending
  std::vector<int> nodes;  // the node of each
  int own = 0;             // this rank's place among them

  int own_node() const { return nodes[static_cast<size_t>(own)]; }
  // Places in `ranks` of those on one node.
  std::vector<int> on_node(int node) const;
  // This rank's place among those of its node.
  int place_on_node() const;
  std::vector<int> distinct_nodes() const;  // ascending
  bool is_on_one_node() const { return distinct_nodes().size() == 1; }
  int fewest_ranks_on_a_node() const;
};

// Whether a segment between the ranks of this rank's node is of use: where not, none need be made.
bool wants_shared_memory(const Placement& placement, const Options& options);

// Between ranks that share no memory, or are not to use it. `algorithm`: as the option allreduce_algorithm.
std::unique_ptr<Group> make_network_group(const std::string& algorithm, const Peers& peers, const Tuning& tuning);

// `memory`: shared by this rank's node; without mailboxes when there are none, which then holds on all nodes. `mpi`:
// null when the placement is a single rank. `tag`: keeps the messages of this process set apart. `tuning` outlives the
// Group. All ranks of the placement call this at the same time.
std::unique_ptr<Group> choose_group(const Placement& placement, const Options& options, const Tuning& tuning, Mpi* mpi,
                                    int tag, NodeMemory memory, Watch& watch);

}  // namespace ringtrain
