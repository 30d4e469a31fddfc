#include "coordination/membership.h"

#include <algorithm>
#include <numeric>

namespace ringtrain {

Membership::Membership(int world_size) {
  std::vector<int> world(static_cast<size_t>(world_size));
  std::iota(world.begin(), world.end(), 0);
  sets_[0] = Set(std::move(world));
}

Membership::Set::Set(std::vector<int> in_order) : ranks(std::move(in_order)), by_rank(ranks.size()) {
  std::iota(by_rank.begin(), by_rank.end(), 0);
  std::sort(by_rank.begin(), by_rank.end(),
            [this](int a, int b) { return ranks[static_cast<size_t>(a)] < ranks[static_cast<size_t>(b)]; });
}

int Membership::add(std::vector<int> ranks) {
  sets_[next_id_] = Set(std::move(ranks));
  return next_id_++;
}

Membership Membership::of(int id) const {
  Membership some(world_size());
  some.sets_[id] = Set(ranks(id));
  return some;
}

int Membership::place(int id, int rank) const {
  const auto found = sets_.find(id);
  if (found == sets_.end()) return -1;
  const auto& [ranks, by_rank, joined] = found->second;
  const auto is_before = [&ranks = ranks](int place, int other) { return ranks[static_cast<size_t>(place)] < other; };
  const auto it = std::lower_bound(by_rank.begin(), by_rank.end(), rank, is_before);
  return it != by_rank.end() && ranks[static_cast<size_t>(*it)] == rank ? *it : -1;
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
