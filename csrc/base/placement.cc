#include "base/placement.h"

#include <algorithm>
#include <set>

namespace ringtrain {

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

void Placement::set_link_rates(const std::vector<uint64_t>& of_nodes) {
  link_rates.clear();
  if (of_nodes.empty()) return;
  for (const int node : nodes) link_rates.push_back(of_nodes[static_cast<size_t>(node)]);
}

std::vector<uint64_t> Placement::link_rates_of(const std::vector<int>& some) const {
  std::vector<uint64_t> rates;
  std::set<int> used;
  if (link_rates.empty()) return rates;
  for (const int rank : some) {
    const auto place = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
    if (!used.insert(nodes[place]).second) return {};
    rates.push_back(link_rates[place]);
  }
  return rates;
}

int Placement::fewest_ranks_on_a_node() const {
  size_t fewest = ranks.size();
  for (const int node : distinct_nodes()) fewest = std::min(fewest, on_node(node).size());
  return static_cast<int>(fewest);
}

}  // namespace ringtrain
