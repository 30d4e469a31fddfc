#include "coordination/tree_channel.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/clock.h"

namespace ringtrain {

void TreeChannel::begin_and(const Words& words) {
  ++round_;
  if (!values_.empty()) values_[static_cast<size_t>(rank())] = own_value_;
  if (!is_direct()) return;
  pack(words);
  for_each_other([&](int other) { send_round(other); });
}

bool TreeChannel::finish_and(Words& words, double) {
  if (!is_direct()) {
    go_up_and_down(words);
    return true;
  }
  if (std::isfinite(patience_s_)) call_late();
  for_each_other([&](int other) { hear(other, words); });
  return true;
}

void TreeChannel::pack(const Words& words) {
  const uint64_t size = words.size();
  message_.resize(message_bytes(size));
  std::memcpy(message_.data(), &size, sizeof(size));
  std::memcpy(message_.data() + sizeof(size), words.data(), size * sizeof(uint64_t));
  if (!values_.empty())
    std::memcpy(message_.data() + message_.size() - sizeof(SmallValue), &own_value_, sizeof(SmallValue));
}

// A Network takes a message that is shorter than what was asked for.
void TreeChannel::receive_round(int from, Words& words) {
  uint64_t size = 0;
  message_.assign(message_bytes(words.size()), 0);
  wire_.receive(from, Tag::bits, message_.data(), message_.size());
  std::memcpy(&size, message_.data(), sizeof(size));
  if (size != words.size())
    throw invalid_from(wire_.rank_of_world(from),
                       std::to_string(size) + " words of a round that has " + std::to_string(words.size()));
  std::memcpy(words.data(), message_.data() + sizeof(size), size * sizeof(uint64_t));
  if (values_.empty()) return;
  SmallValue& value = values_[static_cast<size_t>(from)];
  std::memcpy(&value, message_.data() + message_.size() - sizeof(SmallValue), sizeof(SmallValue));
  if (value.bytes > SmallValue::kMostBytes)
    throw invalid_from(wire_.rank_of_world(from), "a value of " + std::to_string(value.bytes) + " bytes");
}

void TreeChannel::hear(int from, Words& words) {
  theirs_.resize(words.size());
  receive_round(from, theirs_);
  for (size_t i = 0; i < words.size(); ++i) words[i] &= theirs_[i];
}

void TreeChannel::call_late() {
  const double end = now_s() + patience_s_;
  for_each_other([&](int other) {
    if (!wire_.arrives_within(other, Tag::bits, std::max(0.0, end - now_s()))) call(other);
  });
}

void TreeChannel::go_up_and_down(Words& words) {
  bool has_called = !std::isfinite(patience_s_);
  for (int child = first_child(); child < end_of_children(); ++child) {
    if (!has_called && !wire_.arrives_within(child, Tag::bits, patience_s_)) {
      call_neighbours();
      has_called = true;
    }
    hear(child, words);
  }
  pack(words);
  if (rank() != 0) {
    send_round(parent());
    theirs_.resize(words.size());
    receive_round(parent(), theirs_);
    for (size_t i = 0; i < words.size(); ++i)
      if (theirs_[i] & ~words[i])
        throw invalid_from(wire_.rank_of_world(parent()), "bits that are not set on all ranks");
    words.swap(theirs_);
  }
  // The message of the parent goes on to the children as it is.
  for (int child = first_child(); child < end_of_children(); ++child) send_round(child);
}

// A rank that is called comes to the round and, if it has to wait there, calls its own neighbours: all are reached in
// O(log size) hops. One that has its answer already is called for nothing.
void TreeChannel::call_neighbours() {
  if (rank() != 0) call(parent());
  for (int child = first_child(); child < end_of_children(); ++child) call(child);
}

bool TreeChannel::is_called() {
  while (wire_.has_arrived(Tag::call)) {
    uint64_t round = 0;
    wire_.receive_from_any(Tag::call, &round, sizeof(round));
    // No rank can be further than one round ahead of this one.
    if (round <= round_ + 1) called_for_ = std::max(called_for_, round);
  }
  // A rank of the tree that has told its parent does not call it.
  return called_for_ > round_ || (!is_direct() && wire_.has_arrived(Tag::bits));
}

// A subtree's message is those of its ranks, which are consecutive, in order.
Gathered TreeChannel::gather(Gathered mine) {
  for (int distance = 1; distance < size(); distance *= 2) {
    if (rank() & distance) {
      wire_.send(rank() - distance, Tag::gather, mine.bytes());
      return {};
    }
    const int other = rank() + distance;
    if (other < size()) receive_gathered(other, std::min(distance, size() - other), mine);
  }
  return mine;
}

// From a subtree of so many ranks.
void TreeChannel::receive_gathered(int from, int ranks, Gathered& gathered) {
  const Bytes bytes = wire_.receive(from, Tag::gather);
  const auto first = messages_.begin() + from;
  try {
    gathered.append(bytes, std::accumulate(first, first + ranks, size_t{0}));
  } catch (const Error& error) {
    throw invalid_from(wire_.rank_of_world(from), std::string("announcements that are invalid: ") + error.what());
  }
}

Bytes TreeChannel::broadcast(const Bytes& mine) {
  int distance = 1;
  while (distance < size() && !(rank() & distance)) distance *= 2;
  const Bytes bytes = rank() == 0 ? mine : wire_.receive(rank() - distance, Tag::broadcast);
  for (distance /= 2; distance > 0; distance /= 2)
    if (rank() + distance < size()) wire_.send(rank() + distance, Tag::broadcast, bytes);
  return bytes;
}

NodeChannel::NodeChannel(int rank, int size, std::unique_ptr<Channel> node, std::unique_ptr<TreeChannel> cross,
                         const std::vector<std::vector<int>>& ranks_of_node)
    : Channel(rank, size), node_(std::move(node)), cross_(std::move(cross)), node_of_rank_(static_cast<size_t>(size)) {
  for (size_t node_number = 0; node_number < ranks_of_node.size(); ++node_number) {
    for (const int member : ranks_of_node[node_number]) {
      node_of_rank_[static_cast<size_t>(member)] = static_cast<int>(node_number);
      ranks_.push_back(member);
    }
  }
}

bool NodeChannel::finish_and(Words& words, double) {
  node_->finish_and(words, std::numeric_limits<double>::infinity());
  Bytes result;
  if (cross_) {
    cross_->and_bits(words);
    const char* begin = reinterpret_cast<const char*>(words.data());
    result.assign(begin, begin + words.size() * sizeof(uint64_t));
  }
  result = node_->broadcast(result);
  if (result.size() != words.size() * sizeof(uint64_t))
    throw failure("the first rank of this node has sent another number of words than a round has");
  std::memcpy(words.data(), result.data(), result.size());
  return true;
}

Gathered NodeChannel::gather(const Bytes& mine) {
  Gathered of_node = node_->gather(mine);
  return cross_ ? cross_->gather(std::move(of_node)) : Gathered();
}

Bytes NodeChannel::broadcast(const Bytes& mine) { return node_->broadcast(cross_ ? cross_->broadcast(mine) : Bytes()); }

}  // namespace ringtrain
