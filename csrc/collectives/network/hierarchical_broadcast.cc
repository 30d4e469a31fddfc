// A broadcast over several nodes: along the lane of the root, and from there to all of each node, block by block. While
// a node copies a block, the network takes in the next one.
//
// A root without a lane first gives its node the data, which the first lane then takes to the other nodes.
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
  const Parts::Seat seat = parts_.seat_of(root);
  const bool has_lane = seat.place < parts_.lanes;
  const int lane = has_lane ? seat.place : 0;
  const bool is_on_node = parts_.own_node == seat.node;

  for_each_block(pieces, [&](const std::vector<Piece>& block) {
    if (!has_lane && is_on_node) parts_.node->broadcast_all(block, seat.place);
    if (parts_.node->rank() == lane) parts_.cross->broadcast_all(block, seat.node);
    if (has_lane || !is_on_node) parts_.node->broadcast_all(block, lane);
  });
}

}  // namespace ringtrain
