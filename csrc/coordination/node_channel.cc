#include "coordination/node_channel.h"

#include <cstring>
#include <limits>
#include <utility>

#include "coordination/blobs.h"

namespace ringtrain {

bool NodeChannel::finish_and(Words& words, double) {
  node_->finish_and(words, std::numeric_limits<double>::infinity());
  Bytes result;
  if (cross_) {
    cross_->and_bits(words);
    const char* begin = reinterpret_cast<const char*>(words.data());
    result.assign(begin, begin + words.size() * sizeof(uint64_t));
  }
  result = node_->broadcast(result);
  std::memcpy(words.data(), result.data(), result.size());
  return true;
}

std::vector<Bytes> NodeChannel::gather(const Bytes& mine) {
  const std::vector<Bytes> of_node = node_->gather(mine);
  if (!cross_) return {};
  const std::vector<Bytes> of_nodes = cross_->gather(joined(of_node));
  if (of_nodes.empty()) return {};
  std::vector<Bytes> blobs(static_cast<size_t>(size()));
  for (size_t node = 0; node < of_nodes.size(); ++node) {
    std::vector<Bytes> of_one = separated(of_nodes[node], ranks_of_node_[node].size());
    for (size_t place = 0; place < of_one.size(); ++place)
      blobs[ranks_of_node_[node][place]] = std::move(of_one[place]);
  }
  return blobs;
}

Bytes NodeChannel::broadcast(const Bytes& mine) { return node_->broadcast(cross_ ? cross_->broadcast(mine) : Bytes()); }

}  // namespace ringtrain
