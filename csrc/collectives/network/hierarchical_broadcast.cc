// A broadcast over several nodes: along the lane of the root, and from there to all of each node, block by block. While
// a node copies a block, the network takes in the next one.
//
// A root without a lane first gives its node the data, which the first lane then takes to the other nodes.
#include <algorithm>
#include <utility>

#include "collectives/network/hierarchical_group.h"

namespace ringtrain {
namespace {

constexpr size_t kBlockBytes = 1 << 20;

// Calls visit(pieces) for blocks of at most kBlockBytes, with several pieces or a part of one.
template <typename Visit>
void for_each_block(const std::vector<Piece>& pieces, Visit visit) {
  std::vector<Piece> block;
  size_t bytes = 0;
  const auto end = [&] {
    if (!block.empty()) visit(block);
    block.clear();
    bytes = 0;
  };
  for (const Piece& piece : pieces)
    for_each_part(piece.count, kBlockBytes, [&](size_t begin, size_t count) {
      if (bytes + count > kBlockBytes) end();
      char* data = static_cast<char*>(piece.destination) + begin;
      block.push_back({data, data, count});
      bytes += count;
    });
  end();
}

}  // namespace

void HierarchicalGroup::broadcast_all(const std::vector<Piece>& pieces, int root) {
  const auto place_in = [root](const std::vector<int>& of_node) {
    return std::find(of_node.begin(), of_node.end(), root) - of_node.begin();
  };
  size_t node = 0;
  while (place_in(parts_.ranks[node]) == static_cast<ptrdiff_t>(parts_.ranks[node].size())) ++node;
  const auto root_node = static_cast<int>(node), root_place = static_cast<int>(place_in(parts_.ranks[node]));
  const bool has_lane = root_place < parts_.lanes;
  const int lane = has_lane ? root_place : 0;
  const bool is_on_node = parts_.own_node == root_node;

  for_each_block(pieces, [&](const std::vector<Piece>& block) {
    if (!has_lane && is_on_node) parts_.node->broadcast_all(block, root_place);
    if (parts_.node->rank() == lane) parts_.cross->broadcast_all(block, root_node);
    if (has_lane || !is_on_node) parts_.node->broadcast_all(block, lane);
  });
}

}  // namespace ringtrain
