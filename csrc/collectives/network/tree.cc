#include "collectives/network/tree.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace ringtrain {
namespace {

// What comes from the left goes on to the right, chunk by chunk; the first of the chain only sends, the last only
// receives.
class Chain final : public Messages {
 public:
  Chain(const Endpoint& peers, const Message& data, size_t chunk_bytes)
      : peers_(peers),
        data_(data),
        chunk_bytes_(chunk_bytes),
        is_first_(peers.rank() == data.peer),
        is_last_(peers.wrap(peers.rank() + 1) == data.peer) {}
  size_t count() const override { return chunks_of(data_.bytes, chunk_bytes_); }
  Message outgoing(size_t i) override { return is_last_ ? Message{} : part(i, peers_.rank() + 1); }
  Message incoming(size_t i) override { return is_first_ ? Message{} : part(i, peers_.rank() - 1); }
  bool may_send(size_t i, size_t arrived) const override { return is_first_ || i < arrived; }

 private:
  Message part(size_t i, int peer) const {
    const Chunk chunk = chunk_of(data_.bytes, chunk_bytes_, i);
    return {data_.data + chunk.offset, chunk.count, peers_.wrap(peer)};
  }

  const Endpoint& peers_;
  const Message data_;
  const size_t chunk_bytes_;
  const bool is_first_, is_last_;
};

}  // namespace

// The root is number 0. A rank receives from the rank whose number lacks its lowest bit, and sends to those whose
// numbers have one lower bit more.
void broadcast_by_tree(Endpoint& peers, const Message& data) {
  if (data.bytes == 0) return;
  const int size = peers.size(), number = peers.wrap(peers.rank() - data.peer);
  int distance = 1;
  while (distance < size && !(number & distance)) distance *= 2;
  if (number > 0) peers.wait(peers.receive(peers.wrap(peers.rank() - distance), data.data, data.bytes));
  std::vector<NetworkRequest> sends;
  for (distance /= 2; distance > 0; distance /= 2)
    if (number + distance < size)
      sends.push_back(peers.send(peers.wrap(peers.rank() + distance), data.data, data.bytes));
  for (NetworkRequest& send : sends) peers.wait(std::move(send));
}

void broadcast_by_chain(Endpoint& peers, const Message& data, size_t chunk_bytes) {
  Chain messages(peers, data, chunk_bytes);
  run(peers, messages);
}

// Rank r gathers what ranks r, r + 1, .. (modulo n) give, in this order. A rank that has gathered from d ranks
// receives what the d-th next rank has gathered, which is from the d ranks behind these.
//
// Source: Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
// 1997.
void allgather_by_doubling(Endpoint& peers, const void* source, void* destination, const Counts& bytes,
                           Scratch& gathered) {
  const int size = peers.size(), rank = peers.rank();
  const auto bytes_of = [&](int first, int ranks) {
    size_t sum = 0;
    for (int i = 0; i < ranks; ++i) sum += bytes[peers.wrap(first + i)];
    return sum;
  };
  const size_t total = total_of(bytes);
  if (total == 0) return;
  char* all = gathered.get(total);
  if (bytes[rank] > 0) std::memcpy(all, source, bytes[rank]);
  for (int distance = 1; distance < size; distance *= 2) {
    const int ranks = std::min(distance, size - distance), before = peers.wrap(rank - distance),
              behind = peers.wrap(rank + distance);
    exchange(peers, {all, bytes_of(rank, ranks), before},
             {all + bytes_of(rank, distance), bytes_of(behind, ranks), behind}, total);
  }
  const size_t before = bytes_of(0, rank), behind = total - before;
  if (before > 0) std::memcpy(destination, all + behind, before);
  if (behind > 0) std::memcpy(static_cast<char*>(destination) + before, all, behind);
}

void barrier_by_dissemination(Endpoint& peers, Scratch& token) {
  char* bytes = token.get(2);
  for (int distance = 1; distance < peers.size(); distance *= 2)
    exchange(peers, {&bytes[0], 1, peers.wrap(peers.rank() + distance)},
             {&bytes[1], 1, peers.wrap(peers.rank() - distance)}, 1);
}

}  // namespace ringtrain
