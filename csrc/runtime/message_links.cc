#include "runtime/message_links.h"

#include <algorithm>

#include "base/error.h"
#include "collectives/group.h"
#include "runtime/fabric.h"

namespace ringtrain {
namespace {

enum class Put : uint32_t { word, piece };
struct PutHead {
  Put what;
  uint32_t place;  // of a piece's values
};

}  // namespace

// --------------------------------------------------------------------------------------------------- within the node

RingLink::RingLink(Node& node, std::vector<int> ranks)
    : node_(node), ranks_(std::move(ranks)), waiting_(static_cast<size_t>(node.size())) {
  members_.resize(static_cast<size_t>(*std::max_element(ranks_.begin(), ranks_.end())) + 1, -1);
  for (size_t i = 0; i < ranks_.size(); ++i) members_[static_cast<size_t>(ranks_[i])] = static_cast<int>(i);
}

void RingLink::call(int member) {
  if (holds_calls_) {
    if (to_call_.empty() || to_call_.back() != member) to_call_.push_back(member);
    return;
  }
  if (node_.rings().call(member)) node_.doorbell(member).ring();
}

bool RingLink::any() const {
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [](const Waiting& one) { return !one.words.empty() || !one.values.empty(); });
}

void RingLink::say(int to, const Text& word, const void* values, size_t bytes) {
  const int member = member_of(to);
  Waiting& waiting = waiting_[static_cast<size_t>(member)];
  Text head;
  const PutHead what = {Put::word, 0};
  head.put(&what, sizeof(what));
  head.put(word.data.data(), word.bytes);
  if (waiting.words.empty() && node_.rings().put(member, head.data.data(), head.bytes, values, bytes))
    return call(member);
  Bytes both(head.data.data(), head.data.data() + head.bytes);
  both.insert(both.end(), static_cast<const char*>(values), static_cast<const char*>(values) + bytes);
  waiting.words.push_back(std::move(both));
}

void RingLink::expect(Values& values) {
  values.place = ++places_;
  expected_[{values.peer, values.place}] = &values;
}

void RingLink::send(Values& values) {
  const int member = member_of(values.peer);
  waiting_[static_cast<size_t>(member)].values.push_back(&values);
  push(member);
}

void RingLink::forget(Values& values) {
  expected_.erase({values.peer, values.place});
  std::deque<Values*>& waiting = waiting_[static_cast<size_t>(member_of(values.peer))].values;
  waiting.erase(std::remove(waiting.begin(), waiting.end(), &values), waiting.end());
}

// Words overtake values, so that a long array delays no other message.
void RingLink::push(int member) {
  Waiting& waiting = waiting_[static_cast<size_t>(member)];
  const auto called = [&](bool has_put) {
    if (has_put) call(member);
    return has_put;
  };
  while (!waiting.words.empty() &&
         called(node_.rings().put(member, waiting.words.front().data(), waiting.words.front().size(), nullptr, 0)))
    waiting.words.pop_front();
  while (waiting.words.empty() && !waiting.values.empty() && called(put_piece(member, *waiting.values.front())))
    if (is_over(*waiting.values.front())) waiting.values.pop_front();
}

// Short ones, so that the other rank copies while this one does.
bool RingLink::put_piece(int member, Values& values) {
  const PutHead head = {Put::piece, values.place};
  constexpr size_t kPiece = size_t{64} << 10;
  const size_t bytes = std::min({values.bytes - values.done, kPiece, node_.rings().most_bytes() - 64});
  if (!node_.rings().put(member, &head, sizeof(head), values.memory + values.done, bytes)) return false;
  values.done += bytes;
  return true;
}

void RingLink::take(Hear hear, void* hearer) {
  node_.rings().take_callers([&](int member) { take_from(member, hear, hearer); });
}

void RingLink::take_from(int member, Hear hear, void* hearer) {
  const int rank = ranks_[static_cast<size_t>(member)];
  const auto handle = [&](const char* data, size_t bytes) {
    PutHead head;
    std::memcpy(&head, data, sizeof(head));
    if (head.what == Put::word)
      hear(hearer, {rank, data + sizeof(head), bytes - sizeof(head)});
    else
      take_piece(rank, head.place, data + sizeof(head), bytes - sizeof(head));
  };
  node_.rings().take(member, handle, [&] { call(member); });
  push(member);
}

// Nobody expects those of a message that has failed here.
void RingLink::take_piece(int rank, uint32_t place, const char* data, size_t bytes) {
  const auto expected = expected_.find({rank, place});
  if (expected == expected_.end()) return;
  Values& values = *expected->second;
  if (bytes > values.bytes - values.done)
    throw failure("rank " + std::to_string(rank) + " has sent more values than its message has");
  std::memcpy(values.memory + values.done, data, bytes);
  values.done += bytes;
  if (is_over(values)) expected_.erase(expected);
}

// ---------------------------------------------------------------------------------------------------- over a network

void NetworkLink::say(int to, const Text& word, const void* values, size_t bytes) {
  if (bytes == 0) return peers_.post(to, 0, word.data.data(), word.bytes);
  Bytes both(word.data.data(), word.data.data() + word.bytes);
  both.insert(both.end(), static_cast<const char*>(values), static_cast<const char*>(values) + bytes);
  peers_.post(to, 0, both.data(), both.size());
}

void NetworkLink::take(Hear hear, void* hearer) {
  constexpr double kMoment_s = 10;
  while (is_called()) {
    const int from = peers_.sender(0);
    const auto message = peers_.take(from, 0, Text::kMostBytes + kMostBytes, kMoment_s);  // most of it is here
    if (!message) throw Error(ErrorKind::peer_lost, "rank " + std::to_string(from) + " has stopped in a word");
    hear(hearer, {from, message->data(), message->size()});
  }
}

void NetworkLink::expect(Values& values) {
  Places& places = places_[values.peer];
  if (!places.free.empty()) {
    values.place = places.free.back();
    places.free.pop_back();
  } else {
    values.place = ++places.used;
    if (peers_.tag() + static_cast<int>(values.place) > kLastTag)
      throw failure("more than " + std::to_string(kLastTag - peers_.tag()) +
                    " long messages from one rank are received at the same time: wait for some of them first");
  }
  values.is_expected = true;
  start(values, false);
}

void NetworkLink::start(Values& values, bool sends) {
  constexpr size_t kMost = size_t{16} << 20;
  values.loan = std::make_shared<char>();
  const Network::Lending lending(&peers_.network(), values.loan);
  const int tag = peers_.tag() + static_cast<int>(values.place);
  for (size_t i = 0; i < chunks_of(values.bytes, kMost); ++i) {
    const Chunk chunk = chunk_of(values.bytes, kMost, i);
    char* const memory = values.memory + chunk.offset;
    values.requests.push_back(sends ? peers_.network().isend(memory, chunk.count, values.peer, tag)
                                    : peers_.network().irecv(memory, chunk.count, values.peer, tag));
  }
}

bool NetworkLink::is_over(Values& values) {
  while (values.done < values.requests.size() && peers_.test(values.requests[values.done])) ++values.done;
  const bool is_over = values.done == values.requests.size();
  if (is_over && std::exchange(values.is_expected, false)) places_[values.peer].free.push_back(values.place);
  return is_over;
}

// The other side may still send them: the place is not used again.
void NetworkLink::forget(Values& values) { values.requests.clear(); }

}  // namespace ringtrain
