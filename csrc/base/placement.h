// The ranks of a process set and where they are.
#pragma once

#include <cstddef>
#include <vector>

namespace ringtrain {

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

}  // namespace ringtrain
