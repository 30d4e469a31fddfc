#include "coordination/membership.h"

#include <algorithm>
#include <numeric>

namespace ringtrain {

Membership::Membership(int world_size) {
  std::vector<int>& world = sets_[0];
  world.resize(static_cast<size_t>(world_size));
  std::iota(world.begin(), world.end(), 0);
}

int Membership::add(std::vector<int> ranks) {
  sets_[next_id_] = std::move(ranks);
  return next_id_++;
}

int Membership::place(int id, int rank) const {
  const auto found = sets_.find(id);
  if (found == sets_.end()) return -1;
  const std::vector<int>& ranks = found->second;
  const auto it = std::lower_bound(ranks.begin(), ranks.end(), rank);
  return it != ranks.end() && *it == rank ? static_cast<int>(it - ranks.begin()) : -1;
}

}  // namespace ringtrain
