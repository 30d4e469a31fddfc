#include "coordination/membership.h"

#include <algorithm>
#include <numeric>

namespace ringtrain {

Membership::Membership(int world_size) {
  std::vector<int>& world = sets_[0].ranks;
  world.resize(static_cast<size_t>(world_size));
  std::iota(world.begin(), world.end(), 0);
}

int Membership::add(std::vector<int> ranks) {
  sets_[next_id_].ranks = std::move(ranks);
  return next_id_++;
}

Membership Membership::of(int id) const {
  Membership some(world_size());
  some.sets_[id].ranks = ranks(id);
  return some;
}

int Membership::place(int id, int rank) const {
  const auto found = sets_.find(id);
  if (found == sets_.end()) return -1;
  const std::vector<int>& ranks = found->second.ranks;
  const auto it = std::lower_bound(ranks.begin(), ranks.end(), rank);
  return it != ranks.end() && *it == rank ? static_cast<int>(it - ranks.begin()) : -1;
}

void Membership::join(int id, int rank) {
  const auto found = sets_.find(id);
  if (found == sets_.end()) return;
  std::vector<int>& joined = found->second.joined;
  if (has_joined(id, rank)) return;
  joined.insert(std::upper_bound(joined.begin(), joined.end(), rank), rank);
}

void Membership::end_join(int id) {
  const auto found = sets_.find(id);
  if (found != sets_.end()) found->second.joined.clear();
}

bool Membership::has_joined(int id, int rank) const {
  const auto found = sets_.find(id);
  if (found == sets_.end()) return false;
  const std::vector<int>& joined = found->second.joined;
  return std::binary_search(joined.begin(), joined.end(), rank);
}

}  // namespace ringtrain
