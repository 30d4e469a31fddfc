// What is of all ranks, cut into runs of whole nodes, for what the ranks of one node do with it in shared memory.
#pragma once

#include <algorithm>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

// Nodes that follow each other, and what of some counts is theirs. Every node has as many ranks.
class NodeRun {
 public:
  // From node `begin` on, as many nodes as have kShort elements together, but at least one: so that what is long is cut
  // where it needs no copy, and what is short takes few steps.
  NodeRun(const std::vector<std::vector<int>>& ranks, const Counts& counts, size_t begin)
      : ranks_(ranks), begin_(begin), end_(begin), lanes_(ranks.front().size()) {
    size_t total = 0;
    do {
      for (size_t place = 0; place < lanes_.size(); ++place) {
        const size_t count = counts[static_cast<size_t>(ranks[end_][place])];
        lanes_[place] += count;
        total += count;
      }
      ++end_;
    } while (end_ < ranks.size() && total < kShort);
  }

  size_t end() const { return end_; }
  // By place: the counts of the ranks with that place.
  const Counts& lanes() const { return lanes_; }
  // Whether in the order of lanes the ranks are in their own order, without another between.
  bool is_in_order() const {
    int next = ranks_[begin_][0];
    bool is = true;
    for_each([&](size_t rank) { is = is && static_cast<int>(rank) == next++; });
    return is;
  }
  size_t first_rank() const { return static_cast<size_t>(ranks_[begin_][0]); }
  // Calls visit(rank) by place, and for a place by node.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (size_t place = 0; place < lanes_.size(); ++place)
      for (size_t node = begin_; node < end_; ++node) visit(static_cast<size_t>(ranks_[node][place]));
  }

 private:
  static constexpr size_t kShort = 64 << 10;

  const std::vector<std::vector<int>>& ranks_;
  size_t begin_, end_;
  Counts lanes_;
};

// Calls visit(run) for all nodes, in order.
template <typename Visit>
void for_each_run(const std::vector<std::vector<int>>& ranks, const Counts& counts, Visit visit) {
  for (size_t node = 0; node < ranks.size();) {
    const NodeRun run(ranks, counts, node);
    visit(run);
    node = run.end();
  }
}

}  // namespace ringtrain
