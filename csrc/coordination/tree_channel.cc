#include "coordination/tree_channel.h"

#include <cmath>

namespace ringtrain {

void TreeChannel::and_bits(Words& words) {
  ++round_;
  const size_t bytes = words.size() * sizeof(uint64_t);
  Words theirs(words.size());
  bool has_called = false;
  for (int distance = 1; distance < size(); distance *= 2) {
    wire_.send((rank() + distance) % size(), Tag::bits, words.data(), bytes);
    if (!has_called && std::isfinite(patience_s_) && !wire_.arrives_within(Tag::bits, patience_s_)) {
      call_neighbours();
      has_called = true;
    }
    wire_.receive((rank() - distance + size()) % size(), Tag::bits, theirs.data(), bytes);
    for (size_t i = 0; i < words.size(); ++i) words[i] &= theirs[i];
  }
}

// Everybody who is called and not yet in the round comes to it and, if it lasts, calls its own neighbours: all are
// reached in O(log size) hops.
void TreeChannel::call_neighbours() {
  for (int distance = 1; distance < size(); distance *= 2)
    wire_.send((rank() + distance) % size(), Tag::call, &round_, sizeof(round_));
}

bool TreeChannel::is_called() {
  while (wire_.has_arrived(Tag::call)) {
    uint64_t round = 0;
    wire_.receive_from_any(Tag::call, &round, sizeof(round));
    if (round > round_) return true;
  }
  return wire_.has_arrived(Tag::bits);
}

std::vector<Bytes> TreeChannel::gather(const Bytes& mine) {
  // A subtree's message is the blobs of its ranks, which are consecutive, in order.
  std::vector<Bytes> blobs = {mine};
  for (int distance = 1; distance < size(); distance *= 2) {
    if (rank() & distance) {
      Writer writer;
      writer.put(static_cast<uint32_t>(blobs.size()));
      for (const Bytes& blob : blobs) writer.put(blob);
      send(rank() - distance, Tag::gather, writer.take());
      return {};
    }
    if (rank() + distance >= size()) continue;
    const Bytes subtree = receive(rank() + distance, Tag::gather);
    Reader reader(subtree);
    for (auto count = reader.get<uint32_t>(); count > 0; --count) reader.get(blobs.emplace_back());
  }
  return blobs;
}

Bytes TreeChannel::broadcast(const Bytes& mine) {
  int distance = 1;
  while (distance < size() && !(rank() & distance)) distance *= 2;
  const Bytes bytes = rank() == 0 ? mine : receive(rank() - distance, Tag::broadcast);
  for (distance /= 2; distance > 0; distance /= 2)
    if (rank() + distance < size()) send(rank() + distance, Tag::broadcast, bytes);
  return bytes;
}

void TreeChannel::send(int to, Tag tag, const Bytes& bytes) {
  const uint64_t size = bytes.size();
  wire_.send(to, tag, &size, sizeof(size));
  if (size > 0) wire_.send(to, tag, bytes.data(), size);
}

Bytes TreeChannel::receive(int from, Tag tag) {
  uint64_t size = 0;
  wire_.receive(from, tag, &size, sizeof(size));
  Bytes bytes(size);
  if (size > 0) wire_.receive(from, tag, bytes.data(), size);
  return bytes;
}

}  // namespace ringtrain
