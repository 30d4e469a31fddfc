#include "coordination/star_channel.h"

namespace ringtrain {

bool StarChannel::finish_and(Words& words, double) {
  const size_t bytes = words.size() * sizeof(uint64_t);
  if (rank() != 0) {
    wire_.send(0, Tag::bits, words.data(), bytes);
    wire_.receive(0, Tag::bits, words.data(), bytes);
    return true;
  }
  Words theirs(words.size());
  for (int other = 1; other < size(); ++other) {
    wire_.receive(other, Tag::bits, theirs.data(), bytes);
    for (size_t i = 0; i < words.size(); ++i) words[i] &= theirs[i];
  }
  for (int other = 1; other < size(); ++other) wire_.send(other, Tag::bits, words.data(), bytes);
  return true;
}

std::vector<Bytes> StarChannel::gather(const Bytes& mine) {
  if (rank() != 0) {
    wire_.send(0, Tag::gather, mine);
    return {};
  }
  std::vector<Bytes> blobs = {mine};
  for (int other = 1; other < size(); ++other) blobs.push_back(wire_.receive(other, Tag::gather));
  return blobs;
}

Bytes StarChannel::broadcast(const Bytes& mine) {
  if (rank() != 0) return wire_.receive(0, Tag::broadcast);
  for (int other = 1; other < size(); ++other) wire_.send(other, Tag::broadcast, mine);
  return mine;
}

}  // namespace ringtrain
