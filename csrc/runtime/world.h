// The world as ringtrain/job/world.py describes it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/placement.h"
#include "gpu/nccl.h"
#include "network/mpi.h"
#include "network/sockets.h"

namespace ringtrain {

struct World {
  int rank = 0;
  std::vector<RankName> names;  // of every rank
  std::vector<int> nodes;       // the node of every rank, numbered by first appearance: rank 0 is on node 0
  int cores = 1;                // that the ranks of this rank's node can keep busy at the same time
  std::string token;            // differs from job to job
  std::variant<std::monostate, MpiDescription, SocketDescription> network;  // nothing for a world of one rank
  int gpu = -1;                     // that init() has chosen for this rank; -1: none yet
  std::vector<NcclCandidate> nccl;  // the best first
  bool looks_for_sharing = true;    // of a GPU by two ranks; not if init() has warned of that already

  int size() const { return static_cast<int>(names.size()); }
  // These ranks of the world, ascending. `own` is -1 when this rank is not among them.
  Placement place(const std::vector<int>& ranks) const;
  // The member's place among all ranks of its node.
  int place_on_node(int member) const;
  int ranks_on_own_node() const;
};

}  // namespace ringtrain
