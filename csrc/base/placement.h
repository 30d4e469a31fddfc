// The ranks of a process set and where they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ringtrain {

struct Placement {
  std::vector<int> ranks;  // of the world
  std::vector<int> nodes;  // the node of each
  int own = 0;             // this rank's place among them
  // kbit/s of the link of each rank's host; empty where they are alike or unknown.
  std::vector<uint64_t> link_rates;

  int own_node() const { return nodes[static_cast<size_t>(own)]; }
  // Places in `ranks` of those on one node.
  std::vector<int> on_node(int node) const;
  // This rank's place among those of its node.
  int place_on_node() const;
  std::vector<int> distinct_nodes() const;  // ascending
  // The ranks at this place of each node, by node.
  std::vector<int> column(size_t place) const {
    std::vector<int> column;
    for (const int node : distinct_nodes()) column.push_back(ranks[static_cast<size_t>(on_node(node).at(place))]);
    return column;
  }
  // `of_nodes`: by node; empty where they are alike or unknown.
  void set_link_rates(const std::vector<uint64_t>& of_nodes);
  // Of some of its ranks, each alone on its node; nothing for others, which share links.
  std::vector<uint64_t> link_rates_of(const std::vector<int>& some) const;
  bool is_on_one_node() const { return distinct_nodes().size() == 1; }
  int fewest_ranks_on_a_node() const;
};

// The name of a rank in messages.
struct RankName {
  int rank = 0;
  std::string host;
  int64_t pid = 0;
};

inline std::string to_string(const RankName& name) {  // "rank 3 (host h2, pid 4711)"
  return "rank " + std::to_string(name.rank) + " (host " + name.host + ", pid " + std::to_string(name.pid) + ")";
}

// The words for a rank whose process has ended without shutdown().
inline std::string is_gone(const RankName& name) {
  return to_string(name) +
         " is gone: its process was killed or exited early, without shutdown(). Look at the end of its output for the "
         "reason.";
}

}  // namespace ringtrain
