// An alltoall over several nodes: the ranks of a node give each lane what is for its ranks, on whatever node, and the
// lanes exchange it, in one message for each node in place of one for each rank.
//
// This adds two copies, so long messages go straight to their ranks. Nobody knows all sizes, so the longest one is
// agreed on first, and the ranks of a node tell each other what they send.
#include <algorithm>
#include <cstdint>

#include "collectives/network/hierarchical_group.h"
#include "kernels/copy.h"

namespace ringtrain {
namespace {

constexpr int64_t kLongBytes = 16 << 10;

}  // namespace

void HierarchicalGroup::alltoall(const void* source, const Counts& send_bytes, void* destination,
                                 const Counts& receive_bytes) {
  const auto straight = [&] { fallback().alltoall(source, send_bytes, destination, receive_bytes); };
  if (!parts_.is_even()) return straight();
  auto longest = static_cast<int64_t>(std::max(*std::max_element(send_bytes.begin(), send_bytes.end()),
                                               *std::max_element(receive_bytes.begin(), receive_bytes.end())));
  for (Group* level : {parts_.node.get(), static_cast<Group*>(parts_.cross.get())})
    level->allreduce({DType::int64, Reduce::max}, {{&longest, &longest, 1}});
  if (longest >= kLongBytes) return straight();

  // By place and rank: what the ranks of this node send.
  const size_t mates = static_cast<size_t>(parts_.lanes), size = send_bytes.size();
  Counts sent_by_mates(mates * size);
  parts_.node->allgather(send_bytes.data(), sent_by_mates.data(), Counts(mates, size * sizeof(size_t)));
  const auto sent_by = [&](size_t mate, int rank) { return sent_by_mates[mate * size + static_cast<size_t>(rank)]; };

  // To the lanes of this node.
  const Counts send_offsets = offsets_of(send_bytes);
  char* by_lane = run_.get(total_of(send_bytes));
  char* next = by_lane;
  Counts to_lanes, from_mates;
  for (size_t place = 0; place < mates; ++place) {
    const char* begin = next;
    size_t from_mate = 0;
    for (const auto& of_node : parts_.ranks) {
      const auto to = static_cast<size_t>(of_node[place]);
      copy(next, static_cast<const char*>(source) + send_offsets[to], send_bytes[to]);
      next += send_bytes[to];
      from_mate += sent_by(place, of_node[parts_.place()]);
    }
    to_lanes.push_back(static_cast<size_t>(next - begin));
    from_mates.push_back(from_mate);
  }
  char* of_mates = own_lane_.get(total_of(from_mates));
  parts_.node->alltoall(by_lane, to_lanes, of_mates, from_mates);

  // What came lies by mate and node. It leaves by node and mate, and comes so from the other nodes.
  Counts to_nodes, from_nodes, mate_offsets = offsets_of(from_mates);
  char* by_node = run_.get(total_of(from_mates));
  next = by_node;
  for (const auto& of_node : parts_.ranks) {
    const char* begin = next;
    for (size_t mate = 0; mate < mates; ++mate) {
      const size_t bytes = sent_by(mate, of_node[parts_.place()]);
      next = std::copy_n(of_mates + mate_offsets[mate], bytes, next);
      mate_offsets[mate] += bytes;
    }
    to_nodes.push_back(static_cast<size_t>(next - begin));
    size_t bytes = 0;
    for (const int rank : of_node) bytes += receive_bytes[static_cast<size_t>(rank)];
    from_nodes.push_back(bytes);
  }
  char* arrived = arrived_.get(total_of(receive_bytes));
  parts_.cross->alltoall(by_node, to_nodes, arrived, from_nodes);
  const Counts receive_offsets = offsets_of(receive_bytes);
  for (const auto& of_node : parts_.ranks)
    for (const int rank : of_node) {
      const auto from = static_cast<size_t>(rank);
      copy(static_cast<char*>(destination) + receive_offsets[from], arrived, receive_bytes[from]);
      arrived += receive_bytes[from];
    }
}

}  // namespace ringtrain
