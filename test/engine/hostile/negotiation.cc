// A rank that announces nonsense to rank 0, and a rank 0 that decides nonsense: messages of the negotiation with some
// bytes changed, against a real Coordinator. It may carry on with what it has asked for, or fail with an Error that
// names a rank; nothing else may happen.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "coordination/coordinator.h"
#include "coordination/tree_channel.h"
#include "ranks.h"

namespace ringtrain {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr unsigned kLongest_s = 10;
constexpr int kRounds = 3;
constexpr int kSetOfVictim = 1;  // the other rank is not in it
constexpr int kLeaf = 8;         // with rank 1 as its parent, in a world with too many ranks for direct messages
static_assert(kLeaf + 1 > TreeChannel::kMostDirect);

struct Counts {
  int taken = 0, refused = 0;
};

RequestPtr drawn_request(Draw& draw, const std::string& name) {
  auto request = std::make_shared<Request>();
  Operation& operation = request->operation;
  // An end of a message is announced by one rank, and both ranks have the same request.
  static_assert(kLastOpKind == OpKind::transfer);
  operation.kind = static_cast<OpKind>(draw.below(static_cast<uint64_t>(kLastOpKind)));
  operation.name = operation.kind == OpKind::join ? kJoinName : name;
  if (operation.kind <= OpKind::reducescatter)
    for (uint64_t tensors = 1 + draw.below(2); tensors > 0; --tensors)
      operation.tensors.push_back({static_cast<DType>(draw.below(kDTypes)), {4, static_cast<int64_t>(draw.below(6))}});
  if (operation.kind == OpKind::allreduce && draw.one_in(4)) operation.quantizer = {Quantizer::Kind::two_bit, 0.5f};
  operation.is_registered = operation.kind == OpKind::allreduce && draw.one_in(4);
  if (operation.kind == OpKind::join) operation.numbers = {static_cast<int64_t>(draw.below(3))};
  if (operation.kind == OpKind::add_process_set) operation.numbers = {0, 1};
  if (operation.kind == OpKind::remove_process_set) operation.numbers = {1};
  if (operation.kind == OpKind::open_process_set) operation.numbers = {0, 1};
  if (operation.kind == OpKind::close_process_set) operation.numbers = {1, 0, 1};
  if (draw.one_in(2)) request->site = std::make_shared<const std::string>("train.py:31");
  return request;
}

// Half of the time nothing. Returns whether anything is different.
bool change(Bytes& bytes, Draw& draw) {
  if (draw.one_in(2)) return false;
  const Bytes before = bytes;
  const auto some = [&]() -> char& { return bytes[draw.below(bytes.size())]; };
  for (uint64_t changes = 1 + draw.below(3); changes > 0 && !bytes.empty(); --changes) {
    const uint64_t how = draw.below(4);
    if (how == 0)
      some() = static_cast<char>(draw.any());
    else if (how == 1)
      some() = static_cast<char>(draw.below(12));
    else if (how == 2 && draw.one_in(6))
      bytes.resize(draw.below(bytes.size()));
    else
      some() ^= static_cast<char>(1 << draw.below(8));
  }
  return bytes != before;
}

// The true announcement of a rank that asks for the same; or, `lies`, for something in a set that it is not in.
Bytes announcement_of(const std::vector<RequestPtr>& requests, bool lies, Draw& draw) {
  AnnouncementWriter writer;
  if (lies) {
    Request foreign;
    foreign.operation.name = "foreign";
    foreign.operation.process_set = kSetOfVictim;
    writer.add(foreign, 0);
  }
  for (const RequestPtr& request : requests) writer.add(*request, static_cast<double>(draw.below(2)));
  return writer.take(draw.one_in(20), draw.one_in(2), 0, {}, draw.one_in(4) ? "in train() at train.py:1" : "");
}

// A true decision that all of it can be carried out; or, `lies`, with rows of too many ranks.
Bytes decision_about(const std::vector<RequestPtr>& requests, bool lies, Draw& draw) {
  Decision decision;
  for (const RequestPtr& request : requests) {
    Agreement& agreement = decision.agreements.emplace_back();
    agreement.operation = request->operation;
    if (agreement.operation.kind == OpKind::allgather)
      agreement.rows.assign(agreement.operation.tensors.size(), {4, 4});
    if (draw.one_in(10)) {
      agreement.error = ErrorKind::mismatch;
      agreement.message = "ranks differ";
      agreement.rows.clear();
    }
  }
  if (lies) {
    Agreement& agreement = decision.agreements.emplace_back();
    agreement.operation.kind = OpKind::allgather;
    agreement.operation.name = "rows";
    agreement.operation.tensors = {{DType::float32, {4}}};
    agreement.rows = {{4, 4, 4}};
  }
  if (lies && draw.one_in(2)) decision.evicted = {uint64_t{1} << 40};  // no slot of so few operations
  if (draw.one_in(10)) decision.joined.push_back({0, 0});
  if (draw.one_in(20)) decision.left = {0};
  if (draw.one_in(10)) decision.tuning = Tuning{1 << 20, 1 << 16, 1 << 16, 1 << 16};
  return to_bytes(decision);
}

// Checks what executing a plan relies on.
void require_sound(const Round& round, const std::vector<RequestPtr>& requests) {
  for (const PlanPtr& plan : round.plans) {
    require(!plan->title.empty() && !plan->parts.empty(), "a plan of nothing");
    for (const AgreementPtr& part : plan->parts) {
      if (part->error != ErrorKind::none) continue;
      const Operation& agreed = part->operation;
      for (const RequestPtr& request : requests) {
        const Operation& own = request->operation;
        if (key_of(own) != key_of(agreed) || agreed.kind > OpKind::reducescatter) continue;
        require(own.kind == agreed.kind && own.tensors.size() == agreed.tensors.size(), "a plan that nobody asked for");
        for (size_t t = 0; t < own.tensors.size(); ++t)
          require(own.tensors[t].row_bytes() == agreed.tensors[t].row_bytes(), "a plan of other sizes");
      }
      for (const std::vector<int64_t>& rows : part->rows) require(rows.size() == 2, "rows of other ranks");
    }
  }
  for (const int rank : round.left) require(rank == 0 || rank == 1, "a rank has left that does not exist");
}

// The other one of two ranks, or the parent of one of many, which answers whatever it is asked for.
class LyingWire final : public Wire {
 public:
  LyingWire(int rank, int size, Draw& draw) : rank_(rank), size_(size), draw_(draw) {}

  void set_message(Bytes message) {
    message_ = std::move(message);
    has_told_length_ = false;
  }

  bool has_lied() const { return has_lied_; }
  bool has_told_all() const { return has_told_length_; }
  bool has_told_long_value() const { return has_told_long_value_; }
  void note_lie(bool lies) { has_lied_ |= lies; }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  // It hears how many words the round has.
  void send(int, Tag tag, const void* data, size_t) override {
    if (tag == Tag::bits) std::memcpy(&words_, data, sizeof(words_));
  }
  void receive(int, Tag tag, void* data, size_t bytes) override {
    if (tag == Tag::bits) return tell_bits(static_cast<char*>(data), bytes);
    if (std::exchange(has_told_length_, true)) return tell_message(static_cast<char*>(data), bytes);
    const bool lies = draw_.one_in(100);
    note_lie(lies);
    const uint64_t length = lies ? draw_.any() : message_.size();
    std::memcpy(data, &length, sizeof(length));
  }
  bool has_arrived(Tag tag) override { return tag == Tag::call && draw_.one_in(4); }
  void receive_from_any(Tag, void* data, size_t bytes) override {
    const uint64_t round = draw_.one_in(2) ? draw_.any() : draw_.below(4);
    require(bytes == sizeof(round), "a call of another length");
    std::memcpy(data, &round, sizeof(round));
  }
  bool arrives_within(int, Tag, double) override { return true; }

 private:
  // "All stay, something is new", and now and then bits that nobody has set, or another number of words. Among two
  // ranks a value comes with them, now and then one that is too long.
  void tell_bits(char* data, size_t most) {
    if (rest_of_value_ > 0) {
      require(most <= rest_of_value_, "more of a value than there is");
      rest_of_value_ -= most;
      return;
    }
    uint64_t size = words_;
    Words words(size);
    words.back() = 2;
    if (draw_.one_in(100)) {
      note_lie(true);
      size = draw_.below(size);
    }
    if (draw_.one_in(20)) {
      note_lie(true);
      for (uint64_t& word : words) word = draw_.one_in(4) ? draw_.any() : word;
    }
    std::memcpy(data, &size, sizeof(size));
    std::memcpy(data + sizeof(size), words.data(), words.size() * sizeof(uint64_t));
    const size_t head = (1 + words_) * sizeof(uint64_t);
    if (size_ == 2) tell_value(data + head, most - head);
  }
  void tell_value(char* data, size_t room) {
    const bool is_too_long = draw_.one_in(20);
    note_lie(is_too_long);
    has_told_long_value_ |= is_too_long;
    const auto slot = static_cast<int32_t>(draw_.below(3)) - 1;
    auto size = static_cast<uint32_t>(draw_.below(draw_.one_in(10) ? Value::kMostBytes + 1 : 65));
    if (is_too_long) size += Value::kMostBytes + 1;
    std::memcpy(data, &slot, sizeof(slot));
    std::memcpy(data + sizeof(slot), &size, sizeof(size));
    const size_t part = std::min<size_t>(size, room - sizeof(slot) - sizeof(size));
    if (!is_too_long) rest_of_value_ = size - part;
  }
  void tell_message(char* data, size_t bytes) {
    std::memset(data, 0, bytes);
    std::memcpy(data, message_.data(), std::min(bytes, message_.size()));
  }

  const int rank_, size_;
  Draw& draw_;
  Bytes message_;
  uint64_t words_ = 0;        // of this round
  size_t rest_of_value_ = 0;  // which is still to be told
  bool has_told_length_ = false, has_lied_ = false, has_told_long_value_ = false;
};

void try_rounds(Draw& draw, LyingWire& wire) {
  turn.assert_held();  // one thread
  const int victim = wire.rank();
  TreeChannel channel(wire, kNever);
  Membership membership(2);
  require(membership.add({victim}) == kSetOfVictim, "a process set has another id");
  Blockage blockage;
  Coordinator coordinator(channel, membership, blockage, {});
  std::string name = "a";
  for (int round = 0; round < kRounds; ++round) {
    // No rank submits again what the other rank has hidden by its lie.
    std::vector<RequestPtr> requests = {drawn_request(draw, name)};
    // A join that the other rank has hidden by its lie is still pending in the next round.
    const bool is_last = round + 1 == kRounds;
    while (requests.front()->operation.kind == OpKind::join && !is_last) requests = {drawn_request(draw, name)};
    // No rank joins twice, or goes on meanwhile.
    while (requests.front()->operation.kind != OpKind::join && requests.size() == 1 && draw.one_in(2)) {
      const RequestPtr other = drawn_request(draw, "b" + std::to_string(round));
      if (other->operation.kind != OpKind::join) requests.push_back(other);
    }
    Coordinator::News news = {blockage.count(), {}, false};
    for (const RequestPtr& request : requests) news.fresh.push_back({request});
    coordinator.begin_round(news);
    channel.is_called();
    const bool lies = draw.one_in(20);
    wire.note_lie(lies);
    Bytes message = victim == 0 ? announcement_of(requests, lies, draw) : decision_about(requests, lies, draw);
    if (!lies) wire.note_lie(change(message, draw));
    if (victim == 0) message = Gathered(message).bytes();
    if (!lies && draw.one_in(20)) wire.note_lie(change(message, draw));
    wire.set_message(std::move(message));
    const Round* const agreed = coordinator.finish_round(kNever);
    require(agreed != nullptr, "a round without an end");
    require(!lies || !wire.has_told_all() || !membership.has(kSetOfVictim), "a lie is taken for true");
    require(!wire.has_told_long_value(), "a value that is too long is taken");
    require_sound(*agreed, requests);
    const auto is_of_first = [&](const AgreementPtr& part) {
      return part->operation.name == requests.front()->operation.name;
    };
    const bool is_done = std::any_of(agreed->plans.begin(), agreed->plans.end(), [&](const PlanPtr& plan) {
      return std::any_of(plan->parts.begin(), plan->parts.end(), is_of_first);
    });
    if (!is_done) name = "a" + std::to_string(round);
    for (size_t i = 0; i < agreed->plans.size(); ++i) blockage.note_carried_out(now_s());
    if (!agreed->left.empty()) return;
  }
}

// A leaf of the tree hears from its parent which bits all have set.
void try_result(Draw& draw, LyingWire& wire) {
  TreeChannel channel(wire, kNever);
  for (int round = 0; round < kRounds; ++round) {
    Words words(1 + draw.below(3)), own;
    for (uint64_t& word : words) word = draw.any();
    words.back() |= 2;
    own = words;
    channel.and_bits(words);
    for (size_t i = 0; i < words.size(); ++i) require(!(words[i] & ~own[i]), "a bit that is not set here is taken");
  }
}

}  // namespace

void try_negotiation(int trials, uint64_t seed) {
  Counts counts;
  for (int trial = 0; trial < trials; ++trial, ++seed) {
    std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    alarm(kLongest_s);
    Draw draw(seed);
    const bool is_leaf = draw.one_in(10);
    const int rank = is_leaf ? kLeaf : static_cast<int>(draw.below(2));
    LyingWire wire(rank, is_leaf ? kLeaf + 1 : 2, draw);
    try {
      if (is_leaf)
        try_result(draw, wire);
      else
        try_rounds(draw, wire);
      ++counts.taken;
    } catch (const Error& error) {
      const std::string text = error.what();
      const std::string beginning = "rank " + std::to_string(is_leaf ? 1 : 1 - rank) + " has sent ";
      require(error.kind() == ErrorKind::failure && text.find(beginning) == 0, "an error that names nobody: " + text);
      require(wire.has_lied(), "what is true is refused: " + text);
      ++counts.refused;
    }
  }
  alarm(0);
  std::printf("%d taken, %d refused\n", counts.taken, counts.refused);
}

}  // namespace ringtrain
