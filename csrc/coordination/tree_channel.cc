#include "coordination/tree_channel.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/clock.h"

namespace ringtrain {

void TreeChannel::begin_and(const Words& words) {
  ++round_;
  own_value_ = std::exchange(next_value_, {});
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
  const size_t head = head_bytes(size);
  const size_t begin = std::min<size_t>(kMostBehindWords, own_value_.bytes);
  message_.resize(head + begin);
  std::memcpy(message_.data(), &size, sizeof(size));
  std::memcpy(message_.data() + sizeof(size), words.data(), size * sizeof(uint64_t));
  if (!is_direct()) return;
  const ValueHead value = {own_value_.slot, own_value_.bytes};
  std::memcpy(message_.data() + head - sizeof(value), &value, sizeof(value));
  std::copy_n(own_value_.data, begin, message_.begin() + static_cast<std::ptrdiff_t>(head));
}

void TreeChannel::send_round(int to) {
  wire_.send(to, Tag::bits, message_.data(), message_.size());
  for (size_t sent = kMostBehindWords; sent < own_value_.bytes; sent += kMostAtOnce)
    wire_.send(to, Tag::bits, own_value_.data + sent, std::min<size_t>(kMostAtOnce, own_value_.bytes - sent));
}

void TreeChannel::receive_round(int from, Words& words) {
  uint64_t size = 0;
  Arrived& arrived = arrived_[is_direct() ? static_cast<size_t>(from) : 0];
  const size_t head = head_bytes(words.size()), most = head + most_value_bytes();
  arrived.message.resize(most);
  std::memset(arrived.message.data(), 0, head);
  wire_.receive(from, Tag::bits, arrived.message.data(), head + std::min(kMostBehindWords, most - head));
  std::memcpy(&size, arrived.message.data(), sizeof(size));
  if (size != words.size())
    throw invalid_from(wire_.rank_of_world(from),
                       std::to_string(size) + " words of a round that has " + std::to_string(words.size()));
  std::memcpy(words.data(), arrived.message.data() + sizeof(size), size * sizeof(uint64_t));
  if (is_direct()) receive_value(from, head, arrived);
}

void TreeChannel::receive_value(int from, size_t head_bytes, Arrived& arrived) {
  ValueHead value;
  std::memcpy(&value, arrived.message.data() + head_bytes - sizeof(value), sizeof(value));
  if (value.bytes > most_value_bytes())
    throw invalid_from(wire_.rank_of_world(from), "a value of " + std::to_string(value.bytes) + " bytes");
  char* const data = arrived.message.data() + head_bytes;
  for (size_t place = kMostBehindWords; place < value.bytes; place += kMostAtOnce)
    wire_.receive(from, Tag::bits, data + place, std::min<size_t>(kMostAtOnce, value.bytes - place));
  arrived.value = {value.slot, value.bytes, data};
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
    pack(words);
  }
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
    : Channel(rank, size),
      node_(std::move(node)),
      cross_(std::move(cross)),
      nodes_(ranks_of_node.size()),
      node_of_rank_(static_cast<size_t>(size)) {
  for (size_t node_number = 0; node_number < ranks_of_node.size(); ++node_number) {
    for (const int member : ranks_of_node[node_number]) {
      node_of_rank_[static_cast<size_t>(member)] = static_cast<int>(node_number);
      ranks_.push_back(member);
    }
  }
}

// So many for all nodes, though a rank that is no leader has no Channel to the others.
size_t NodeChannel::most_value_bytes() const {
  return sums_ || is_alone_everywhere() ? TreeChannel::most_value_bytes(nodes_) : 0;
}

void NodeChannel::put_value(const Value& value) {
  if (is_alone_everywhere()) return cross_->put_value(value);
  const size_t sum_bytes = value.operation ? sums_->sum_bytes(*value.operation) : 0;
  if (sum_bytes == 0 || sum_bytes > most_value_bytes()) return;
  next_value_ = value;
  node_->put_value({value.slot});
}

bool NodeChannel::has_node_put() {
  if (own_value_.slot < 0) return false;
  for (int member = 0; member < node_->size(); ++member)
    if (member != node_->rank() && node_->value_of(member).slot != own_value_.slot) return false;
  return true;
}

bool NodeChannel::have_all_put() {
  const Value own = cross_->value_of(cross_->rank());
  for (int node = 0; node < cross_->size(); ++node) {
    const Value value = cross_->value_of(node);
    if (value.slot != own.slot || value.bytes != own.bytes) return false;
  }
  return own.slot >= 0;
}

void NodeChannel::begin_and(const Words& words) {
  own_value_ = std::exchange(next_value_, {});
  words_ = words;
  has_come_ = false;
  node_->begin_and(words_);
}

// A value waits for finish_and(): all ranks of the node add theirs up together.
void NodeChannel::go_on() {
  if (!cross_ || has_come_ || own_value_.slot >= 0) return;
  has_come_ = node_->finish_and(words_, kAtOnce);
  if (has_come_) cross({});
}

void NodeChannel::cross(const Value& sum) {
  if (!is_alone_everywhere()) cross_->put_value(sum);
  cross_->begin_and(words_);
}

// The result, and behind it whether the sums of all nodes have come.
bool NodeChannel::finish_and(Words& words, double) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  if (!has_come_) {
    node_->finish_and(words_, kNever);
    const Value sum = has_node_put() ? sums_->add_on_node(own_value_) : Value();
    if (cross_) cross(sum);
  }
  Bytes result;
  std::vector<const void*> sums;
  if (cross_) {
    cross_->finish_and(words_, kNever);
    words.swap(words_);
    const char* begin = reinterpret_cast<const char*>(words.data());
    result.assign(begin, begin + words.size() * sizeof(uint64_t));
    if (!is_alone_everywhere() && have_all_put())
      for (int node = 0; node < cross_->size(); ++node) sums.push_back(cross_->value_of(node).data);
    result.push_back(sums.empty() ? 0 : 1);
  }
  result = node_->broadcast(result);
  if (result.size() != words.size() * sizeof(uint64_t) + 1)
    throw failure("the first rank of this node has sent another number of words than a round has");
  std::memcpy(words.data(), result.data(), result.size() - 1);
  sum_of_all_ = {};
  if (result.back() != 0) {
    const auto* const data = static_cast<const char*>(sums_->add_nodes(*own_value_.operation, sums));
    sum_of_all_ = {own_value_.slot, own_value_.bytes, data};
  }
  return true;
}

Gathered NodeChannel::gather(const Bytes& mine) {
  Gathered of_node = node_->gather(mine);
  return cross_ ? cross_->gather(std::move(of_node)) : Gathered();
}

Bytes NodeChannel::broadcast(const Bytes& mine) { return node_->broadcast(cross_ ? cross_->broadcast(mine) : Bytes()); }

}  // namespace ringtrain
