#include "runtime/world.h"

#include <algorithm>

namespace ringtrain {

Placement World::place(const std::vector<int>& ranks) const {
  Placement placement;
  placement.ranks = ranks;
  for (const int member : ranks) placement.nodes.push_back(nodes[static_cast<size_t>(member)]);
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  placement.own = own == ranks.end() ? -1 : static_cast<int>(own - ranks.begin());
  return placement;
}

int World::ranks_on_own_node() const {
  return static_cast<int>(std::count(nodes.begin(), nodes.end(), nodes[static_cast<size_t>(rank)]));
}

int World::place_on_node(int member) const {
  return static_cast<int>(std::count(nodes.begin(), nodes.begin() + member, nodes[static_cast<size_t>(member)]));
}

}  // namespace ringtrain
