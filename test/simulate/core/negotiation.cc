// The world of the negotiation: the real Coordinators, Ledgers, PlanCaches and TreeChannels of some ranks that run a
// training script, while messages are slow, ranks are stopped or killed, leave early, or submit what does not fit.
//
// A rank is two fibres: `script` submits operations and waits for them, `engine` does what Engine::take_turn does.
// Moving tensors is only a meeting of the ranks of the process set, in which some begin the next round. A death is seen
// by the ranks with connections to the dead one, or on its node. They tell it by the real Alarm, and all that hear of
// it leave soon.
//
// One seed in kSeedsOfLarge has 65 to 300 ranks, and a third of them may be stopped while one dies.
//
// Rules. All ranks get the same plans of the world in the same order, and the ranks of a node the same plans of rounds
// that ended on it, which have parts of ranks of this node alone. A plan without an error has parts that every rank of
// its set has submitted, or contributes zeros to after a join. A value that travels beside the bits is the one of the
// pending operation. A warning, and a StalledError, name only ranks that have not submitted the operation by the round
// in which they are written, and not before the limit has passed. A DeadlockError comes only while every script waits.
// Without a cause there is no error. An engine that has lost a rank names one that was killed, and a rank that is not
// stopped hears of the death soon after the first one. In the end nobody waits, but for an operation that some rank
// never submits where no limit ends the wait; then a warning has named the rank.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <unordered_map>

#include "base/log.h"
#include "coordination/backlog.h"
#include "coordination/coordinator.h"
#include "coordination/tree_channel.h"
#include "fibres.h"
#include "network/alarm.h"

namespace ringtrain {

using simulation::Fibres;
using simulation::kNever;
using simulation::Random;
using simulation::Story;
using simulation::Telling;

namespace {

constexpr double kHealed_s = 40, kEnd_s = 160;
constexpr double kTreePatience_s = 0.001;
constexpr size_t kMostValueBytes = 64;
constexpr double kTurn_s = 1e-6, kMostPatience_s = 0.004;
// With longer delays, ranks with inner steps would be later than the others by the limit of a stall.
constexpr double kShortDelay_s = 0.002;
constexpr double kSoon_s = 0.7, kMessagesOfStep = 200;
// In which the others hear of a death.
constexpr double kHeard_s = 4;
constexpr int kAlarmTag = 15;
constexpr uint64_t kSeedsOfLarge = 1000;

// ----------------------------------------------------------------------------------------------------- what is drawn

struct Step {
  std::vector<RequestPtr> requests;  // in the order of submission
  bool waits_for_each = false;       // before it submits the next one
  double pause_before_s = 0, pause_between_s = 0;
};

struct Fault {
  enum Kind { stop, kill, absent, leave, mismatch, only_some, crosswise, slow_link, freeze };
  Kind kind;
  int rank = 0;
  double at = 0, duration = 0;  // of stop, kill (until it is noticed) and slow_link
  size_t step = 0;              // of what the script does
  int other = 0;                // the other end of a slow link
  size_t number = 0;
};

const char* name_of(Fault::Kind kind) {
  constexpr const char* kNames[] = {"stop",      "kill",      "absent",    "leave", "mismatch",
                                    "only_some", "crosswise", "slow_link", "freeze"};
  return kNames[kind];
}

std::string text_of(const Fault& fault) {
  char text[120];
  const char* name = name_of(fault.kind);
  if (fault.kind == Fault::slow_link)
    std::snprintf(text, sizeof(text), "%s from rank %d to rank %d from %.3f s on, for %.3f s", name, fault.rank,
                  fault.other, fault.at, fault.duration);
  else if (fault.kind == Fault::freeze)
    std::snprintf(text, sizeof(text), "%s a third of the ranks at %.3f s, for %.3f s", name, fault.at, fault.duration);
  else if (fault.kind <= Fault::kill)
    std::snprintf(text, sizeof(text), "%s rank %d at %.3f s, for %.3f s", name, fault.rank, fault.at, fault.duration);
  else
    std::snprintf(text, sizeof(text), "%s rank %d in step %zu", name, fault.rank, fault.step);
  return text;
}

struct Draw {
  int ranks = 2;
  int nodes = 1;               // more than 1: a NodeChannel
  bool shares_memory = false;  // on each node, else a TreeChannel over messages
  double delay_least = 0, delay_most = 0;
  bool is_link_long = false;  // the words of the next round may travel during a plan
  Coordinator::Limits limits;
  std::vector<std::vector<Step>> scripts;  // by rank
  std::vector<double> clock_offsets;
  std::vector<Fault> faults;
};

int first_of_node(int node, const Draw& draw) { return node * draw.ranks / draw.nodes; }

int node_of(int rank, const Draw& draw) {
  int node = 0;
  while (rank >= first_of_node(node + 1, draw)) ++node;
  return node;
}

RequestPtr request_of(OpKind kind, const std::string& name, Shape shape, int priority, int process_set = 0) {
  auto request = std::make_shared<Request>();
  request->operation.kind = kind;
  request->operation.name = name;
  request->operation.process_set = process_set;
  if (kind <= OpKind::reducescatter) request->operation.tensors = {{DType::float32, std::move(shape)}};
  request->priority = priority;
  return request;
}

RequestPtr request_of_sets(OpKind kind, const std::string& name, std::vector<int64_t> numbers) {
  auto request = std::make_shared<Request>();
  request->operation.kind = kind;
  request->operation.name = name;
  request->operation.numbers = std::move(numbers);
  return request;
}

// The script of all ranks, and what is different on some.
class Drawing {
 public:
  explicit Drawing(uint64_t seed) : random_(seed), is_large_(seed % kSeedsOfLarge == kSeedsOfLarge / 2) {}

  Draw draw() {
    draw_world();
    draw_.scripts.resize(static_cast<size_t>(draw_.ranks));
    if (random_.chance(draw_.nodes > 1 ? 0.7 : 0.4) && !is_large_) add_process_sets();
    const int phases = random_.chance(0.3) && !is_large_ ? 2 : 1;
    for (int phase = 0; phase < phases; ++phase) {
      if (random_.chance(0.25) && !is_large_)
        add_uneven_steps();
      else
        add_steps();
    }
    if (random_.chance(0.3)) remove_process_sets();
    // A rank that has come to its end leaves, and ends the job for those that go on without it.
    for (auto& script : draw_.scripts) script.emplace_back().requests = {request_of(OpKind::barrier, "last", {}, 0)};
    draw_faults();
    draw_.is_link_long = random_.chance(0.4);
    return std::move(draw_);
  }

 private:
  void draw_world() {
    // As many as use the tree of a TreeChannel, and as few as send to each other.
    const bool are_many = random_.chance(0.2);
    draw_.ranks = are_many ? random_.between(9, 13) : random_.between(2, random_.chance(0.9) ? 6 : 8);
    if (is_large_) draw_.ranks = draw_large();
    draw_.nodes = random_.chance(0.3) ? random_.between(2, std::min(3, draw_.ranks)) : 1;
    if (are_many && !is_large_ && random_.chance(0.2)) draw_.nodes = random_.between(9, draw_.ranks);
    draw_.shares_memory = random_.chance(0.5);
    draw_.delay_least = random_.real(1e-6, 1e-4);
    draw_.delay_most = draw_.delay_least + random_.real(0, random_.chance(0.5) ? 0.001 : 0.05);
    draw_.limits.cache_capacity = random_.one_of(std::vector<size_t>{1, 2, 4, 1024});
    draw_.limits.fusion_threshold_bytes = random_.one_of(std::vector<size_t>{1, 64, 1 << 20});
    draw_.limits.stall_warning_s = 4;
    draw_.limits.stall_shutdown_s = random_.one_of(std::vector<double>{0, 7, 12});
    for (int rank = 0; rank < draw_.ranks; ++rank)
      draw_.clock_offsets.push_back(random_.chance(0.5) ? 0 : random_.real(0, 1e6));
    const int operations = random_.between(1, is_large_ ? 2 : 8);
    for (int i = 0; i < operations; ++i) names_.push_back("g" + std::to_string(i));
  }

  // Often a little more than a power of two.
  int draw_large() {
    if (random_.chance(0.5)) return random_.one_of(std::vector<int>{64, 64, 128, 128, 256}) + random_.between(1, 3);
    return random_.between(65, random_.chance(0.8) ? 130 : 300);
  }

  // Each is added by all ranks, one after the other.
  void add_process_sets() {
    const int count = random_.between(1, 3);
    for (int i = 0; i < count; ++i) {
      // Often the ranks of a node.
      const int node = draw_.nodes > 1 && random_.chance(0.7) ? random_.below(draw_.nodes) : -1;
      std::vector<int64_t> members;
      for (int rank = 0; rank < draw_.ranks; ++rank)
        if (node >= 0 ? node_of(rank, draw_) == node : random_.chance(0.6)) members.push_back(rank);
      if (members.empty()) members.push_back(random_.below(draw_.ranks));
      sets_.push_back(members);
      for (auto& script : draw_.scripts) {
        Step& step = script.emplace_back();
        step.requests = {request_of_sets(OpKind::add_process_set, "<add " + std::to_string(i) + ">", members)};
      }
    }
  }

  void remove_process_sets() {
    for (size_t i = 0; i < sets_.size(); ++i)
      for (auto& script : draw_.scripts)
        script.emplace_back().requests = {request_of_sets(
            OpKind::remove_process_set, "<remove " + std::to_string(i) + ">", {static_cast<int64_t>(i + 1)})};
  }

  RequestPtr draw_request(const std::string& name, int process_set, const std::vector<int64_t>& members) {
    const int kind = random_.below(10);
    const int64_t rows = random_.between(1, 64);
    const int priority = random_.below(3);
    if (kind == 0) return request_of(OpKind::allgather, name, {rows, 2}, priority, process_set);
    if (kind == 1) {
      const auto request = request_of(OpKind::broadcast, name, {rows}, priority, process_set);
      std::const_pointer_cast<Request>(request)->operation.root = static_cast<int32_t>(random_.one_of(members));
      return request;
    }
    if (kind == 2) return request_of(OpKind::barrier, name, {}, priority, process_set);
    if (kind == 3) return request_of(OpKind::reducescatter, name, {rows, 2}, priority, process_set);
    return request_of(OpKind::allreduce, name, {random_.chance(0.5) ? 4 : rows}, priority, process_set);
  }

  // The operation of this name, the same in nearly all steps: after a change it is announced anew.
  RequestPtr request_under(const std::string& name, int process_set) {
    const std::string full = process_set ? name + " of set " + std::to_string(process_set) : name;
    RequestPtr& known = known_[full];
    if (!known || random_.chance(0.05)) {
      std::vector<int64_t> members = process_set ? sets_[static_cast<size_t>(process_set - 1)] : std::vector<int64_t>();
      for (int rank = 0; members.empty() && rank < draw_.ranks; ++rank) members.push_back(rank);
      known = draw_request(full, process_set, members);
    }
    return known;
  }

  bool takes_part(int rank, int process_set) const {
    if (process_set == 0) return true;
    const std::vector<int64_t>& members = sets_[static_cast<size_t>(process_set - 1)];
    return std::find(members.begin(), members.end(), rank) != members.end();
  }

  void add_steps() {
    const int steps = random_.between(1, is_large_ ? 1 : 8);
    const bool waits_for_each = random_.chance(0.15);
    const double pause = random_.chance(0.3) ? 0.5 : 0.05;
    for (int i = 0; i < steps; ++i) {
      std::vector<RequestPtr> requests;
      for (const std::string& name : names_) {
        if (random_.chance(0.2)) continue;
        requests.push_back(request_under(name, sets_.empty() ? 0 : random_.below(static_cast<int>(sets_.size()) + 1)));
      }
      // A name that comes once takes the place of an operation in the cache.
      if (draw_.nodes > 1 && random_.chance(0.3))
        requests.push_back(request_of(OpKind::allreduce, "once" + std::to_string(++names_that_come_once_), {4}, 0));
      for (int process_set = 1; process_set <= static_cast<int>(sets_.size()); ++process_set)
        if (draw_.delay_most < kShortDelay_s && random_.chance(0.5)) add_inner_steps(process_set);
      for (int rank = 0; rank < draw_.ranks; ++rank) {
        Step& step = draw_.scripts[static_cast<size_t>(rank)].emplace_back();
        for (const RequestPtr& request : requests)
          if (takes_part(rank, request->operation.process_set)) step.requests.push_back(own(request));
        step.waits_for_each = waits_for_each;
        if (!waits_for_each && random_.chance(0.7)) random_.shuffle(step.requests);
        step.pause_before_s = random_.real(0, pause);
        step.pause_between_s = random_.chance(0.5) ? 0 : random_.real(0, 0.005);
      }
    }
  }

  // Of the ranks of a set alone, as in an island of DiLoCo between outer steps.
  void add_inner_steps(int process_set) {
    const int steps = random_.between(1, 3);
    for (int i = 0; i < steps; ++i) {
      std::vector<RequestPtr> requests;
      for (const std::string& name : names_)
        if (random_.chance(0.7)) requests.push_back(request_under("inner " + name, process_set));
      for (const int64_t rank : sets_[static_cast<size_t>(process_set - 1)]) {
        Step& step = draw_.scripts[static_cast<size_t>(rank)].emplace_back();
        for (const RequestPtr& request : requests) step.requests.push_back(own(request));
        step.pause_before_s = random_.real(0, 0.01);
      }
    }
  }

  // Ranks give as many rows as they like to an allgather.
  RequestPtr own(const RequestPtr& request) {
    if (request->operation.kind != OpKind::allgather) return request;
    auto copy = std::make_shared<Request>(*request);
    copy->operation.tensors[0].shape[0] =
        random_.chance(0.5) ? request->operation.tensors[0].shape[0] : random_.between(0, 9);
    return copy;
  }

  // Each rank has data for another number of steps and joins then.
  void add_uneven_steps() {
    const std::vector<std::string> names(names_.begin(),
                                         names_.begin() + (1 + random_.below(static_cast<int>(names_.size()))));
    for (auto& script : draw_.scripts) {
      const int steps = random_.between(0, 5);
      for (int i = 0; i < steps; ++i) {
        Step& step = script.emplace_back();
        for (const std::string& name : names)
          step.requests.push_back(request_of(OpKind::allreduce, "u" + name, {4}, 0));
        random_.shuffle(step.requests);
        step.pause_before_s = random_.real(0, 0.2);
      }
      // Some join while their last operations are still pending.
      if (steps == 0 || random_.chance(0.6)) script.emplace_back().pause_before_s = random_.real(0, 0.2);
      script.back().requests.push_back(request_of_sets(OpKind::join, kJoinName, {0}));
    }
  }

  // Swarm: each story draws how many of each kind it has, so that some have many of one and none of another.
  void draw_faults() {
    const auto add = [&](Fault::Kind kind, double probability, int most) {
      for (int i = 0; i < most && random_.chance(probability); ++i) {
        Fault fault = {kind, random_.below(draw_.ranks)};
        fault.at = random_.real(0, 8);
        fault.duration = kind == Fault::stop   ? random_.real(0.01, random_.chance(0.3) ? 25 : 3)
                         : kind == Fault::kill ? random_.real(0, 2)
                                               : random_.real(0.01, 6);
        fault.step = static_cast<size_t>(random_.below(6));
        fault.other = random_.below(draw_.ranks);
        fault.number = draw_.faults.size();
        draw_.faults.push_back(fault);
      }
    };
    if (random_.chance(0.2)) return;
    if (is_large_ && random_.chance(0.6)) return draw_death_among_many();
    add(Fault::stop, random_.chance(0.4) ? 0.6 : 0, 4);
    add(Fault::slow_link, random_.chance(0.3) ? 0.6 : 0, 4);
    add(Fault::kill, random_.chance(0.1) ? 0.8 : 0, 2);
    add(Fault::absent, random_.chance(0.25) ? 1 : 0, 1);
    add(Fault::leave, random_.chance(0.1) ? 1 : 0, 1);
    add(Fault::mismatch, random_.chance(0.25) ? 0.7 : 0, 3);
    add(Fault::only_some, random_.chance(0.2) ? 0.7 : 0, 2);
    // With process sets the circle often leads over several lanes, which end then.
    add(Fault::crosswise, random_.chance(sets_.empty() ? 0.15 : 0.5) ? 1 : 0, 1);
  }

  // Ranks that are stopped a moment before another one dies cannot pass on the news.
  void draw_death_among_many() {
    Fault death = {Fault::kill, random_.below(draw_.ranks)};
    death.at = random_.real(0, 1);
    draw_.faults.push_back(death);
    Fault freeze = {Fault::freeze, death.rank};
    freeze.at = death.at;
    freeze.duration = random_.real(8, 20);
    freeze.other = random_.below(1000);
    freeze.number = 1;
    draw_.faults.push_back(freeze);
  }

  Random random_;
  const bool is_large_;
  Draw draw_;
  std::vector<std::string> names_;
  std::vector<std::vector<int64_t>> sets_;
  std::map<std::string, RequestPtr> known_;
  int names_that_come_once_ = 0;
};

// ----------------------------------------------------------------------------------------------------- the transports

// Shared by the transports of all ranks.
class Ether {
 public:
  Ether(Fibres& fibres, Random& random, const Draw& draw)
      : fibres(fibres), random(random), draw(draw), news_(static_cast<size_t>(draw.ranks)), of_nodes_(news_.size()) {}

  double arrival(int from, int to) {
    double delay = random.real(draw.delay_least, draw.delay_most);
    for (const Fault& fault : slow_links)
      if (fault.rank == from && fault.other == to && fibres.now() < fault.at + fault.duration &&
          fault.at < fibres.now())
        delay += fault.at + fault.duration - fibres.now();
    return fibres.now() + delay;
  }
  // A message from one rank to another arrives then; the end of their connection, and the alarm's messages, later.
  void note_sent(int from, int to, double arrival) {
    connect(from, to);
    double& last = last_arrivals_[pair_of(from, to)];
    last = std::max(last, arrival);
  }

  void connect(int one, int other) { connections_[pair_of(one, other)] = connections_[pair_of(other, one)] = true; }
  bool are_connected(int one, int other) const { return connections_.count(pair_of(one, other)) > 0; }

  // ---- what a rank hears of others: messages of their Alarms and ends of connections, and what its node knows
  struct News {
    int from;
    Bytes message;  // empty: the connection has ended
  };
  void send_news(int from, int to, Bytes message) {
    if (ended_.count(from) || ended_.count(to)) return;
    const double time = std::max(arrival(from, to), last_arrivals_[pair_of(from, to)]);
    note_sent(from, to, time);
    add({from, std::move(message)}, to, time);
  }
  // The process of this rank is gone, and seen to be after so long.
  void end(int rank, double noticed_after_s) {
    if (!ended_.insert(rank).second) return;
    for (int other = 0; other < draw.ranks; ++other)
      if (are_connected(rank, other))
        add({rank, {}}, other, std::max(arrival(rank, other), last_arrivals_[pair_of(rank, other)]) + noticed_after_s);
  }
  bool has_news(int rank) const {
    const std::multimap<double, News>& own = news_[static_cast<size_t>(rank)];
    return (!own.empty() && own.begin()->first <= fibres.now()) || !node_news(rank).empty();
  }
  // The first message that has arrived, or else the first end. Null: none.
  const News* first_news(int rank) const {
    const News* first = nullptr;
    for (const auto& [time, one] : news_[static_cast<size_t>(rank)]) {
      if (time > fibres.now()) break;
      if (!one.message.empty()) return &one;
      if (!first) first = &one;
    }
    return first;
  }
  Bytes take_message(int rank) {
    std::multimap<double, News>& own = news_[static_cast<size_t>(rank)];
    const auto first =
        std::find_if(own.begin(), own.end(), [](const auto& one) { return !one.second.message.empty(); });
    Bytes message = std::move(first->second.message);
    own.erase(first);
    return message;
  }
  // The last words on its node, or that a rank there is dead; empty without shared memory.
  const std::string& node_news(int rank) const { return of_nodes_[static_cast<size_t>(node_of(rank, draw))]; }
  void set_node_news(int rank, const std::string& text) {
    std::string& words = of_nodes_[static_cast<size_t>(node_of(rank, draw))];
    if (draw.shares_memory && words.empty()) words = text;
  }

  // As PeerWatch::look().
  void listen(int rank) {
    if (!has_news(rank)) return;
    if (!node_news(rank).empty()) throw Error(ErrorKind::peer_lost, node_news(rank));
    alarms[static_cast<size_t>(rank)]->listen();
  }

  Fibres& fibres;
  Random& random;
  const Draw& draw;
  std::vector<Fault> slow_links;
  std::vector<std::unique_ptr<Alarm>> alarms;  // by rank

 private:
  uint64_t pair_of(int from, int to) const {
    return static_cast<uint64_t>(from) * static_cast<uint64_t>(draw.ranks) + static_cast<uint64_t>(to);
  }
  void add(News news, int to, double time) {
    news_[static_cast<size_t>(to)].emplace(time, std::move(news));
    fibres.look_at(time);
  }

  std::vector<std::multimap<double, News>> news_;  // by rank, by arrival
  std::vector<std::string> of_nodes_;
  std::unordered_map<uint64_t, bool> connections_;
  std::unordered_map<uint64_t, double> last_arrivals_;
  std::set<int> ended_;
};

// The Network of an Alarm.
class NewsNetwork final : public Network {
 public:
  NewsNetwork(int rank, Ether& ether) : rank_(rank), ether_(ether) {}

  NetworkRequest isend(const void* data, size_t bytes, int to, int) override {
    const char* begin = static_cast<const char*>(data);
    ether_.send_news(rank_, to, Bytes(begin, begin + bytes));
    return begun(0, Kind::message);
  }
  NetworkRequest irecv(void* data, size_t bytes, int, int) override {
    const Bytes message = ether_.take_message(rank_);
    std::copy_n(message.begin(), std::min(bytes, message.size()), static_cast<char*>(data));
    return begun(0, Kind::message);
  }
  bool has_arrived(int from, int) override {
    const Ether::News* news = ether_.first_news(rank_);
    return news && !news->message.empty() && news->from == from;
  }
  bool has_arrived_from_any(int) override {
    const Ether::News* news = ether_.first_news(rank_);
    if (news && news->message.empty())
      throw Error(ErrorKind::peer_lost, "rank " + std::to_string(news->from) + " is gone");
    return news != nullptr;
  }
  bool would_see_end_at(int rank) const override { return ether_.are_connected(rank_, rank); }

 private:
  int look(uint64_t&, bool& has_ended) noexcept override {
    has_ended = true;
    return 0;
  }
  void require_success(int) const override {}
  void cancel(uint64_t) noexcept override {}

  const int rank_;
  Ether& ether_;
};

// Messages in order for each pair and tag.
class SimulatedWire final : public Wire {
 public:
  struct Message {
    double arrival;
    Bytes data;
  };
  // By receiver, sender and tag, with places among `ranks`.
  struct Messages {
    explicit Messages(std::vector<int> of) : ranks(std::move(of)), arrivals(ranks.size() * kTags) {}
    std::deque<Message>& queue(int to, int from, Tag tag) {
      return queues[(static_cast<size_t>(to) * ranks.size() + static_cast<size_t>(from)) * kTags +
                    static_cast<size_t>(tag)];
    }
    // When messages arrive, and their senders.
    std::multiset<std::pair<double, int>>& arrivals_at(int to, Tag tag) {
      return arrivals[static_cast<size_t>(to) * kTags + static_cast<size_t>(tag)];
    }
    const std::vector<int> ranks;  // of the world
    std::unordered_map<size_t, std::deque<Message>> queues;
    std::vector<std::multiset<std::pair<double, int>>> arrivals;
  };

  SimulatedWire(int place, Messages& messages, Ether& ether) : place_(place), messages_(messages), ether_(ether) {}

  int rank() const override { return place_; }
  int size() const override { return static_cast<int>(messages_.ranks.size()); }

  using Wire::receive;
  using Wire::send;
  void send(int to, Tag tag, const void* data, size_t bytes) override {
    ether_.listen(world_rank());
    std::deque<Message>& queue = messages_.queue(to, place_, tag);
    const int receiver = messages_.ranks[static_cast<size_t>(to)];
    double arrival = ether_.arrival(world_rank(), receiver);
    if (!queue.empty()) arrival = std::max(arrival, queue.back().arrival);
    const char* begin = static_cast<const char*>(data);
    queue.push_back({arrival, Bytes(begin, begin + bytes)});
    messages_.arrivals_at(to, tag).insert({arrival, place_});
    ether_.note_sent(world_rank(), receiver, arrival);
    ether_.fibres.look_at(arrival);
  }
  void receive(int from, Tag tag, void* data, size_t most) override {
    std::deque<Message>& queue = messages_.queue(place_, from, tag);
    wait_until([this, &queue] { return has_come(queue); });
    const size_t bytes = queue.front().data.size();
    if (bytes > most || (bytes < most && tag != Tag::bits))
      throw failure("a message has another size than its receiver expects");
    std::memcpy(data, queue.front().data.data(), bytes);
    std::multiset<std::pair<double, int>>& arrivals = messages_.arrivals_at(place_, tag);
    arrivals.erase(arrivals.find({queue.front().arrival, from}));
    queue.pop_front();
  }
  bool has_arrived(Tag tag) override { return sender(tag) >= 0; }
  void receive_from_any(Tag tag, void* data, size_t bytes) override {
    wait_until([=] { return has_arrived(tag); });
    receive(sender(tag), tag, data, bytes);
  }
  bool arrives_within(int from, Tag tag, double seconds) override {
    const std::deque<Message>& queue = messages_.queue(place_, from, tag);
    wait_until([this, &queue] { return has_come(queue); }, ether_.fibres.now() + seconds);
    return has_come(queue);
  }

 private:
  static constexpr size_t kTags = 4;

  int world_rank() const { return messages_.ranks[static_cast<size_t>(place_)]; }
  template <typename Ready>
  void wait_until(Ready is_ready, double deadline = kNever) {
    const int rank = world_rank();
    ether_.listen(rank);
    if (!is_ready())
      ether_.fibres.wait([this, is_ready, rank] { return is_ready() || ether_.has_news(rank); }, deadline);
    ether_.listen(rank);
  }
  bool has_come(const std::deque<Message>& queue) const {
    return !queue.empty() && queue.front().arrival <= ether_.fibres.now();
  }
  // The lowest one of those whose messages have arrived.
  int sender(Tag tag) {
    int lowest = -1;
    for (const auto& [arrival, from] : messages_.arrivals_at(place_, tag)) {
      if (arrival > ether_.fibres.now()) break;
      lowest = lowest < 0 ? from : std::min(lowest, from);
    }
    return lowest;
  }

  const int place_;
  Messages& messages_;
  Ether& ether_;
};

// A Channel as ShmChannel is one: each rank writes on its board and reads the others', keeps deadlines, and carries
// values.
class BoardChannel final : public Channel {
 public:
  struct Board {
    uint64_t exchanges = 0;
    std::array<Words, 2> words;  // of this exchange and the one before
    std::array<Bytes, 2> bytes;
    std::array<Value, 2> values;
    std::array<Bytes, 2> data;
  };
  struct Boards {
    explicit Boards(size_t size) : of_members(size) {}
    void note_exchange(Board& own) {
      latest = std::max(latest, ++own.exchanges);
      ++come_to[own.exchanges];
    }
    std::vector<Board> of_members;
    uint64_t latest = 0;                           // the exchange that some member has come to
    uint64_t rung_for = 0;                         // the latest one that a member has waited in for long
    std::unordered_map<uint64_t, size_t> come_to;  // by exchange: how many members
  };

  // `calls_by_ringing`: as ShmChannel::Patience.
  BoardChannel(int place, int rank_of_world, Boards& boards, Ether& ether, bool calls_by_ringing)
      : Channel(place, static_cast<int>(boards.of_members.size())),
        rank_of_world_(rank_of_world),
        boards_(boards),
        ether_(ether),
        calls_by_ringing_(calls_by_ringing) {}

  void begin_and(const Words& words) override {
    Board& own = begin();
    own.words[side()] = words;
    const Value value = std::exchange(next_value_, {});
    own.data[side()].assign(value.data, value.data + value.bytes);
    own.values[side()] = {value.slot, value.bytes, own.data[side()].data()};
    boards_.note_exchange(own);
  }
  bool finish_and(Words& words, double deadline) override {
    if (!wait_for_all(deadline)) return false;
    for (const Board& board : boards_.of_members)
      for (size_t i = 0; i < words.size(); ++i) words[i] &= board.words[side()][i];
    return true;
  }
  bool keeps_deadlines() const override { return true; }
  size_t most_value_bytes() const override { return kMostValueBytes; }
  void put_value(const Value& value) override { next_value_ = value; }
  Value value_of(int place) override { return boards_.of_members[static_cast<size_t>(place)].values[side()]; }

  Gathered gather(const Bytes& mine) override { return *gather_until(kNever, mine); }
  Bytes broadcast(const Bytes& mine) override { return *broadcast_until(kNever, mine); }
  std::optional<Gathered> gather_until(double deadline, const Bytes& mine) override {
    if (!exchange(deadline, mine)) return std::nullopt;
    Gathered all;
    if (rank() == 0)
      for (const Board& board : boards_.of_members) all.add(board.bytes[side()]);
    return all;
  }
  std::optional<Bytes> broadcast_until(double deadline, const Bytes& mine) override {
    if (!exchange(deadline, mine)) return std::nullopt;
    return boards_.of_members.front().bytes[side()];
  }
  bool is_called() override { return (calls_by_ringing_ ? boards_.rung_for : boards_.latest) > exchanges_; }

 private:
  size_t side() const { return exchanges_ % 2; }
  Board& begin() {
    ether_.listen(rank_of_world_);
    ++exchanges_;
    return boards_.of_members[static_cast<size_t>(rank())];
  }
  bool exchange(double deadline, const Bytes& mine) {
    if (!has_published_) {
      Board& own = begin();
      own.bytes[side()] = mine;
      boards_.note_exchange(own);
    }
    has_published_ = !wait_for_all(deadline);
    return !has_published_;
  }
  bool have_all_come() const {
    const auto come = boards_.come_to.find(exchanges_);
    return come != boards_.come_to.end() && come->second == boards_.of_members.size();
  }
  bool wait_for_all(double deadline) {
    const double until = deadline == kNever ? kNever : ether_.fibres.now() + (deadline - now_s());
    const double patient_until = std::min(until, ether_.fibres.now() + kTreePatience_s);
    const auto may_go_on = [this] { return have_all_come() || ether_.has_news(rank_of_world_); };
    if (calls_by_ringing_ && !may_go_on()) {
      ether_.fibres.wait(may_go_on, patient_until);
      if (!have_all_come()) boards_.rung_for = std::max(boards_.rung_for, exchanges_);
    }
    if (!have_all_come()) ether_.fibres.wait(may_go_on, until);
    ether_.listen(rank_of_world_);
    return have_all_come();
  }

  const int rank_of_world_;
  Boards& boards_;
  Ether& ether_;
  const bool calls_by_ringing_;
  uint64_t exchanges_ = 0;
  bool has_published_ = false;  // bytes that the others have not come to yet
  Value next_value_;
};

// Adds up tokens, as a Group of several nodes does values.
class Tokens final : public NodeSums {
 public:
  Tokens(int place, int rank_of_world, BoardChannel::Boards& boards, Ether& ether)
      : node_(place, rank_of_world, boards, ether, false) {}

  size_t sum_bytes(const Operation& operation) override { return operation.bytes(); }
  Value add_on_node(const Value& own) override {
    const Gathered all = node_.gather(Bytes(own.data, own.data + sizeof(uint64_t)));
    uint64_t sum = 0;
    all.for_each([&](const Bytes& token, size_t, size_t) { sum += token_of(token.data()); });
    std::memcpy(sum_.data(), &sum, sizeof(sum));
    return {own.slot, node_.rank() == 0 ? own.bytes : 0, sum_.data()};
  }
  const void* add_nodes(const Operation&, const std::vector<const void*>& sums) override {
    uint64_t sum = 0;
    for (const void* one : sums) sum += token_of(one);
    Bytes whole(sizeof(sum));
    std::memcpy(whole.data(), &sum, sizeof(sum));
    whole = node_.broadcast(whole);
    std::copy(whole.begin(), whole.end(), sum_.begin());
    return sum_.data();
  }
  static uint64_t token_of(const void* value) {
    uint64_t token;
    std::memcpy(&token, value, sizeof(token));
    return token;
  }

 private:
  BoardChannel node_;
  std::array<char, kMostValueBytes> sum_ = {};
};

// ------------------------------------------------------------------------------------------------------- the world

// An operation of one rank, from its submission to its end.
struct Own {
  RequestPtr request;
  uint64_t token = 0;  // its value, where that travels beside the bits
  double submitted_s = 0;
  int lane = 0;           // the process set in whose lane it was taken in
  uint64_t taken_in = 0;  // the round of that lane up to which the engine has taken it; 0: not yet
  bool is_done = false;
  std::optional<Error> error;
};
using OwnPtr = std::shared_ptr<Own>;

const std::string kRole = "lane ";

class World;
World* the_world = nullptr;

class World {
 public:
  World(uint64_t seed, const Draw& draw, const Telling& telling, Story& story)
      : draw_(draw),
        telling_(telling),
        story_(story),
        random_(seed ^ 0x9E3779B97F4A7C15),
        fibres_(story, random_, draw.ranks),
        ether_(fibres_, random_, draw) {
    the_world = this;
    for (size_t i = 0; i < draw.faults.size(); ++i) {
      story.faults.push_back(text_of(draw.faults[i]));
      if (!telling.left_out.count(i)) faults_.push_back(draw.faults[i]);
    }
    make_transports();
    make_alarms();
    for (int rank = 0; rank < draw.ranks; ++rank) {
      fibres_.set_clock_offset(rank, draw.clock_offsets[static_cast<size_t>(rank)]);
      ranks_.push_back(std::make_unique<Rank>(rank, draw.ranks));
      make_lane(*ranks_.back(), 0);
    }
    schedule_faults();
    for (int rank = 0; rank < draw.ranks; ++rank) {
      fibres_.start(rank, "script", [this, rank] { run_script(*ranks_[static_cast<size_t>(rank)]); });
    }
  }
  ~World() { the_world = nullptr; }

  void run() {
    fibres_.run(kEnd_s);
    check_end();
  }

  void note_warning(const std::string& text) {
    trace("warning: " + text);
    warnings_.push_back(text);
    const Rank& first = *ranks_[static_cast<size_t>(fibres_.running_rank())];
    const Lane& lane = *first.lanes.at(std::stoi(std::string(fibres_.running_role()).substr(kRole.size())));
    check_absent(text, draw_.limits.stall_warning_s, lane, lane.rounds + 1, "a warning");
  }

 private:
  // As the product's: of the world, or of a process set.
  struct Lane {
    Lane(int set, std::unique_ptr<Channel> own_channel, Membership& membership, Blockage& blockage,
         const Coordinator::Limits& limits)
        : set(set),
          channel(std::move(own_channel)),
          membership(set ? membership.of(set) : Membership(0)),
          coordinator(*channel, set ? this->membership : membership, blockage, limits, set) {}

    const int set;
    const std::unique_ptr<Channel> channel;
    Membership membership;  // that of the world has the rank's
    Coordinator coordinator;
    std::deque<OwnPtr> inbox;
    std::vector<Fresh> taken_in;  // from lanes that have ended
    Backlog backlog;
    std::string whereabouts;  // the answer to a question, until the next round
    uint64_t rounds = 0;      // finished
    uint64_t plans = 0, errors = 0;
    bool is_leaving = false, has_ended = false;
    bool is_between_rounds = false;  // carries out a plan after which another round comes
  };
  struct Rank {
    Rank(int rank, int ranks) : rank(rank), membership(ranks) {}

    const int rank;
    Membership membership;
    Blockage blockage;
    std::map<int, std::unique_ptr<Lane>> lanes;  // by process set, also those that have ended
    std::map<Key, OwnPtr> in_flight;
    std::map<Key, uint64_t> last_tokens;  // of those that have ended
    std::vector<OwnPtr> awaited;          // by the script, while it waits
    uint64_t bell = 0;
    bool has_joined = false;
    bool is_leaving = false, has_ended = false, has_script_ended = false;
    std::optional<Error> end_reason;  // of later submissions

    Lane& world() { return *lanes.at(0); }
    // Where operations of this process set are negotiated now.
    Lane& lane_of(int set) const {
      const auto it = lanes.find(set);
      return it == lanes.end() || it->second->has_ended ? *lanes.at(0) : *it->second;
    }
  };

  // ---- set-up

  void make_transports() {
    for (int node = 0; node < draw_.nodes; ++node) {
      std::vector<int> members;
      for (int rank = first_of_node(node, draw_); rank < first_of_node(node + 1, draw_); ++rank)
        members.push_back(rank);
      nodes_.push_back(members);
    }
  }

  // All ranks are connected before they have channels, as by Fabric::connect(): to each other, or in a tree.
  void make_alarms() {
    constexpr int kChildren = 4, kMostDirect = 8;
    std::vector<RankName> names;
    std::vector<int> all;
    for (int rank = 0; rank < draw_.ranks; ++rank) {
      if (rank > 0) ether_.connect(rank, (rank - 1) / kChildren);
      for (int other = 0; other < rank && draw_.ranks <= kMostDirect; ++other) ether_.connect(rank, other);
      names.push_back({rank, "h", 0});
      all.push_back(rank);
    }
    for (int rank = 0; rank < draw_.ranks; ++rank) {
      networks_.push_back(std::make_unique<NewsNetwork>(rank, ether_));
      ether_.alarms.push_back(
          std::make_unique<Alarm>(Endpoint(*networks_.back(), all, rank, kAlarmTag, nullptr), names));
      if (draw_.shares_memory) ether_.alarms.back()->leave_out(nodes_[static_cast<size_t>(node_of(rank, draw_))]);
    }
  }

  Wire& wire(int place, SimulatedWire::Messages& messages) {
    wires_.push_back(std::make_unique<SimulatedWire>(place, messages, ether_));
    return *wires_.back();
  }

  // Of the ranks of a process set.
  struct Transports {
    Transports(const std::vector<int>& ranks, const Draw& draw) {
      for (size_t place = 0; place < ranks.size(); ++place) {
        const int node = node_of(ranks[place], draw);
        if (nodes.empty() || node_of(ranks[place - 1], draw) != node) {
          nodes.emplace_back();
          leaders.push_back(ranks[place]);
        }
        nodes.back().push_back(static_cast<int>(place));
      }
      for (const std::vector<int>& places : nodes) {
        std::vector<int> members;
        for (const int place : places) members.push_back(ranks[static_cast<size_t>(place)]);
        sizes.push_back(members.size());
        on_node.push_back(std::make_unique<SimulatedWire::Messages>(members));
        boards.push_back(std::make_unique<BoardChannel::Boards>(members.size()));
        of_sums.push_back(std::make_unique<BoardChannel::Boards>(members.size()));
      }
      across = std::make_unique<SimulatedWire::Messages>(leaders);
    }

    std::vector<std::vector<int>> nodes;  // places of the ranks of each
    std::vector<int> leaders;
    std::vector<size_t> sizes;  // how many are on each node
    std::vector<std::unique_ptr<SimulatedWire::Messages>> on_node;
    std::vector<std::unique_ptr<BoardChannel::Boards>> boards, of_sums;
    std::unique_ptr<SimulatedWire::Messages> across;
  };

  // As Fabric::make_channel().
  std::unique_ptr<Channel> channel_of(int rank, int set, const std::vector<int>& ranks) {
    std::unique_ptr<Transports>& of_set = transports_[set];
    if (!of_set) of_set = std::make_unique<Transports>(ranks, draw_);
    Transports& all = *of_set;
    const int place = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
    size_t node = 0;
    while (all.nodes[node].back() < place) ++node;
    const int place_on_node = place - all.nodes[node].front();
    std::unique_ptr<Channel> on_node;
    if (all.nodes[node].size() == 1)
      on_node = std::make_unique<SelfChannel>();
    else if (draw_.shares_memory)
      on_node = std::make_unique<BoardChannel>(place_on_node, rank, *all.boards[node], ether_, all.nodes.size() > 1);
    else
      on_node = std::make_unique<TreeChannel>(wire(place_on_node, *all.on_node[node]), kTreePatience_s);
    if (all.nodes.size() == 1) return on_node;
    std::unique_ptr<TreeChannel> cross;
    if (place_on_node == 0)
      cross = std::make_unique<TreeChannel>(wire(static_cast<int>(node), *all.across), kTreePatience_s, all.sizes);
    auto channel = std::make_unique<NodeChannel>(place, static_cast<int>(ranks.size()), std::move(on_node),
                                                 std::move(cross), all.nodes);
    sums_.push_back(std::make_unique<Tokens>(place_on_node, rank, *all.of_sums[node], ether_));
    channel->add_by(*sums_.back());
    return channel;
  }

  void make_lane(Rank& self, int set) {
    auto channel = channel_of(self.rank, set, self.membership.ranks(set));
    self.lanes[set] = std::make_unique<Lane>(set, std::move(channel), self.membership, self.blockage, draw_.limits);
    fibres_.start(self.rank, kRole + std::to_string(set),
                  [this, rank = self.rank, set] { run_lane(*ranks_[static_cast<size_t>(rank)], set); });
  }

  void schedule_faults() {
    for (const Fault& fault : faults_) {
      if (fault.kind == Fault::slow_link) ether_.slow_links.push_back(fault);
      if (fault.kind == Fault::stop)
        fibres_.at(fault.at, [this, fault] {
          trace_at(fault.rank, "signal", "stopped until " + std::to_string(fault.at + fault.duration));
          fibres_.stop(fault.rank, fault.at + fault.duration);
        });
      if (fault.kind == Fault::kill)
        fibres_.at(fault.at, [this, fault] {
          if (ranks_[static_cast<size_t>(fault.rank)]->has_ended) return;
          trace_at(fault.rank, "signal", "killed");
          fibres_.kill(fault.rank);
          ether_.end(fault.rank, fault.duration);
          fibres_.at(fault.at + fault.duration, [this, fault] {
            ether_.set_node_news(fault.rank, "rank " + std::to_string(fault.rank) + " is gone");
          });
        });
      if (fault.kind == Fault::freeze)
        fibres_.at(fault.at, [this, fault] {
          for (int rank = 0; rank < draw_.ranks; ++rank)
            if (rank != fault.rank && is_frozen(rank, fault)) fibres_.stop(rank, fault.at + fault.duration);
        });
    }
  }

  static bool is_frozen(int rank, const Fault& fault) {
    return Random(static_cast<uint64_t>(rank) * 1000 + static_cast<uint64_t>(fault.other)).below(3) == 0;
  }

  bool has_fault(Fault::Kind kind) const {
    return std::any_of(faults_.begin(), faults_.end(), [&](const Fault& fault) { return fault.kind == kind; });
  }

  // ---- the script

  void run_script(Rank& self) {
    const std::vector<Step>& steps = draw_.scripts[static_cast<size_t>(self.rank)];
    bool may_go_on = true;
    for (size_t i = 0; i < steps.size() && may_go_on; ++i) may_go_on = take_step(self, steps[i], i);
    self.is_leaving = self.world().is_leaving = true;
    ++self.bell;
    self.has_script_ended = true;
    trace("the script ends");
  }

  // False if the script ends here, with an error or by a fault.
  bool take_step(Rank& self, const Step& step, size_t number) {
    std::vector<RequestPtr> requests = step.requests;
    bool waits_for_each = step.waits_for_each;
    const bool is_plain = requests.empty() || requests.back()->operation.kind <= OpKind::barrier;
    for (const Fault& fault : faults_) {
      if (fault.step != number || !is_plain) continue;
      if (fault.kind == Fault::only_some && (fault.rank + self.rank) % 2)
        requests.push_back(request_of(OpKind::allreduce, "only" + std::to_string(fault.number), {4}, 0));
      if (fault.rank != self.rank) continue;
      if (fault.kind == Fault::leave) return false;
      if (fault.kind == Fault::absent) {
        trace("is stuck in something else");
        fibres_.wait(nullptr);
      }
      if (fault.kind == Fault::mismatch && !requests.empty()) requests.front() = mismatched(requests.front());
      if (fault.kind == Fault::crosswise) {
        waits_for_each = true;
        std::reverse(requests.begin(), requests.end());
      }
    }
    fibres_.pause(step.pause_before_s);
    std::vector<OwnPtr> owns;
    for (const RequestPtr& request : requests) {
      const OwnPtr own = submit(self, request);
      if (!own) return false;
      if (waits_for_each && !wait_for(self, {own})) return false;
      owns.push_back(own);
      if (step.pause_between_s > 0) fibres_.pause(step.pause_between_s);
    }
    return wait_for(self, owns);
  }

  static RequestPtr mismatched(const RequestPtr& request) {
    if (request->operation.tensors.empty()) return request;
    auto copy = std::make_shared<Request>(*request);
    copy->operation.tensors[0].shape.push_back(3);
    return copy;
  }

  // Null where the engine has ended.
  OwnPtr submit(Rank& self, const RequestPtr& request) {
    if (self.end_reason) return nullptr;
    auto own = std::make_shared<Own>();
    own->request = request;
    own->token = ++tokens_;
    own->submitted_s = fibres_.now();
    const Key key = key_of(request->operation);
    if (self.in_flight.count(key)) {
      story_.find("the script of rank " + std::to_string(self.rank) + " submits " + key.second +
                  " twice: a mistake of this world");
      return nullptr;
    }
    self.in_flight[key] = own;
    last_submitted_s_[key.second] = fibres_.now();
    self.lane_of(request->operation.process_set).inbox.push_back(own);
    ++self.bell;
    trace("submits " + title_of(request->operation));
    return own;
  }

  // False if an operation has failed of something after which a script ends.
  bool wait_for(Rank& self, const std::vector<OwnPtr>& owns) {
    bool is_well = true;
    for (const OwnPtr& own : owns) {
      if (!own->is_done) {
        self.awaited = {own};
        self.blockage.say(true);
        ++self.bell;
        fibres_.wait([&] { return own->is_done; });
        self.awaited.clear();
      }
      if (own->error && own->error->kind() != ErrorKind::mismatch) is_well = false;
    }
    return is_well;
  }

  // ---- the engine: a fibre works for each lane, and fibres take turns only where they wait, as threads with the turn
  // do

  void run_lane(Rank& self, int set) {
    Lane& lane = *self.lanes.at(set);
    try {
      while (!self.has_ended && !lane.has_ended) {
        sleep_until_work(self, lane);
        // Over a network an engine lets several submissions come before it begins a round.
        fibres_.pause(draw_.nodes > 1 ? random_.real(0, kMostPatience_s) : kTurn_s);
        if (!self.has_ended) take_turn(self, lane);
      }
    } catch (const Error& error) {
      if (self.has_ended) return;
      trace(std::string("the engine fails: ") + error.what());
      fail(self, error);
    }
  }

  // As Engine::fail(). The process ends soon.
  void fail(Rank& self, const Error& error) {
    const std::vector<int> named = ranks_in(error.what());
    if (error.kind() != ErrorKind::peer_lost || named.empty())
      story_.find(std::string("the engine fails: ") + error.what());
    else if (!fibres_.is_killed(named.front()))
      story_.find("rank " + std::to_string(self.rank) + " says that " + error.what() + ", which was not killed");
    if (!has_heard_of_death_) {
      has_heard_of_death_ = true;
      fibres_.at(fibres_.now() + kHeard_s, [this, since = fibres_.now()] { check_heard(since); });
    }
    ether_.set_node_news(self.rank, error.what());
    ether_.alarms[static_cast<size_t>(self.rank)]->raise(error.kind(), error.what());
    close(self, error);
    fibres_.at(fibres_.now() + random_.real(0, random_.chance(0.5) ? 0.002 : 0.5),
               [this, rank = self.rank] { ether_.end(rank, 0); });
  }

  bool has_work(Rank& self, Lane& lane) {
    return self.has_ended || ether_.has_news(self.rank) || !lane.inbox.empty() || !lane.taken_in.empty() ||
           !lane.whereabouts.empty() || !lane.backlog.empty() || lane.coordinator.is_in_round() || lane.is_leaving ||
           lane.channel->is_called() || fibres_.clock_of(self.rank) >= lane.coordinator.next_deadline();
  }

  void sleep_until_work(Rank& self, Lane& lane) {
    while (!has_work(self, lane)) {
      const uint64_t bell = self.bell;
      const double deadline = lane.coordinator.next_deadline();
      const double until = deadline == kNever ? kNever : fibres_.now() + (deadline - fibres_.clock_of(self.rank));
      fibres_.wait([&, bell] { return ether_.has_news(self.rank) || self.bell != bell || lane.channel->is_called(); },
                   std::max(until, fibres_.now() + 1e-9));
    }
    if (!self.has_ended) ether_.listen(self.rank);
  }

  // As Lane::take_turn().
  void take_turn(Rank& self, Lane& lane) {
    Coordinator& coordinator = lane.coordinator;
    if (!coordinator.is_in_round()) begin_round(self, lane, lane.set == 0 ? self.blockage.count() : 0);
    const bool keeps_deadline = lane.channel->keeps_deadlines() && random_.chance(0.3);
    Round* const round = coordinator.finish_round(keeps_deadline ? now_s() + 0.2 : kNever);
    if (!round) return;
    ++lane.rounds;
    if (!round->question.empty()) answer_soon(self, lane);
    enqueue(self, lane, *round);
    if (lane.backlog.size() != 1) round->values.clear();
    if (round->closes_lanes) drain_lanes(self);
    if (!round->left.empty()) return end(self, lane, round->left);
    if (lane.backlog.empty()) return;
    lane.is_between_rounds = true;
    run_plan(self, lane, *lane.backlog.take().plan, round->values);
    lane.is_between_rounds = false;
  }

  void begin_round(Rank& self, Lane& lane, uint64_t blockage) {
    if (telling_.trace) trace("begins round " + std::to_string(lane.rounds + 1));
    Coordinator::News news = {blockage, std::exchange(lane.taken_in, {}), lane.is_leaving};
    for (const Fresh& fresh : news.fresh) note_taken_in(*self.in_flight.at(key_of(fresh.request->operation)), lane);
    for (const OwnPtr& own : lane.inbox) {
      note_taken_in(*own, lane);
      const bool may_travel = own->request->operation.kind == OpKind::allreduce &&
                              own->request->operation.bytes() <= kMostValueBytes &&
                              own->request->operation.bytes() >= sizeof(own->token);
      news.fresh.push_back({own->request, may_travel ? &values_[own->token].front() : nullptr});
      if (may_travel) std::memcpy(values_[own->token].data(), &own->token, sizeof(own->token));
    }
    lane.inbox.clear();
    news.whereabouts = std::exchange(lane.whereabouts, {});
    lane.coordinator.begin_round(news);
  }

  void note_taken_in(Own& own, const Lane& lane) {
    own.lane = lane.set;
    own.taken_in = lane.rounds + 1;
  }

  // As the thread that a rank starts for it, which may have to wait for the GIL.
  void answer_soon(Rank& self, Lane& lane) {
    fibres_.at(fibres_.now() + random_.real(0.001, 1), [&] {
      lane.whereabouts = "in train() at train.py:1";
      ++self.bell;
    });
  }

  void drain(Rank& self, Lane& lane) {
    lane.is_leaving = true;
    ++self.bell;
    fibres_.wait([&] { return lane.has_ended || self.has_ended || ether_.has_news(self.rank); });
    ether_.listen(self.rank);
  }
  void drain_lanes(Rank& self) {
    for (const auto& [set, lane] : self.lanes)
      if (set != 0 && !lane->has_ended) drain(self, *lane);
  }

  void enqueue(Rank& self, Lane& lane, const Round& round) {
    for (const PlanPtr& plan : round.plans) {
      if (plan->parts.front()->error != ErrorKind::none)
        run_plan(self, lane, *plan, {});
      else
        lane.backlog.add({plan, 0});
    }
  }

  void run_plan(Rank& self, Lane& lane, const Plan& plan, const Round::Values& values) {
    const Agreement& first = *plan.parts.front();
    if (self.membership.has(first.operation.process_set)) carry_out(self, lane, plan, values);
    if (!std::any_of(self.awaited.begin(), self.awaited.end(), [](const OwnPtr& own) { return !own->is_done; }))
      self.blockage.say(false);
    self.blockage.note_carried_out(now_s());
  }

  void carry_out(Rank& self, Lane& lane, const Plan& plan, const Round::Values& values) {
    const bool is_first = check_same_everywhere(self, lane, plan);
    if (telling_.trace)
      trace("carries out " + plan.title + (plan.parts.front()->error == ErrorKind::none ? "" : ", as an error"));
    const Agreement& first = *plan.parts.front();
    if (first.error != ErrorKind::none) {
      for (const AgreementPtr& part : plan.parts) fail(self, lane, *part, is_first);
      return;
    }
    if (takes_part(self, first)) meet(self, lane, first.operation.process_set, values);
    for (const AgreementPtr& part : plan.parts) finish(self, lane, *part, values);
  }

  bool takes_part(const Rank& self, const Agreement& agreement) const {
    const OpKind kind = agreement.operation.kind;
    if (kind == OpKind::join || kind == OpKind::add_process_set || kind == OpKind::remove_process_set) return false;
    return self.membership.contains(agreement.operation.process_set, self.rank);
  }

  // The ranks of a set carry out its plans together. Values that came beside the bits need no meeting.
  void meet(Rank& self, Lane& lane, int process_set, const Round::Values& values) {
    if (!values.data.empty()) return;
    const size_t members = self.membership.ranks(process_set).size();
    const uint64_t mine = ++met_[{process_set, self.rank}];
    size_t& come = come_to_[{process_set, mine}];
    ++come;
    const auto is_over = [&, members] { return come == members || ether_.has_news(self.rank); };
    const bool begins_next =
        draw_.is_link_long && process_set == lane.set && lane.is_between_rounds && lane.channel->is_direct();
    for (double pause = random_.real(0, draw_.delay_most); begins_next && !is_over(); pause *= 2) {
      fibres_.wait(is_over, fibres_.now() + pause);
      if (is_over()) break;
      if (!lane.coordinator.is_in_round()) begin_round(self, lane, 0);
      lane.channel->go_on();
    }
    fibres_.wait(is_over);
    ether_.listen(self.rank);
  }

  void finish(Rank& self, const Lane& lane, const Agreement& part, const Round::Values& values) {
    const Operation& operation = part.operation;
    const auto it = self.in_flight.find(key_of(operation));
    const bool has_submitted = it != self.in_flight.end() && it->second->taken_in > 0;
    const bool contributes_zeros = part.has_joined(self.rank);
    const bool is_member = self.membership.contains(operation.process_set, self.rank);
    if (operation.kind != OpKind::join && is_member && has_submitted == contributes_zeros)
      return story_.find(title_of(operation) + " is carried out, and rank " + std::to_string(self.rank) +
                         (has_submitted ? " has submitted it although it counts as joined" : " has not submitted it"));
    if (operation.kind == OpKind::join) self.has_joined = false;
    if (operation.kind == OpKind::add_process_set && self.membership.contains(part.result, self.rank))
      make_lane(self, static_cast<int>(part.result));
    if (operation.kind == OpKind::remove_process_set) remove(self, static_cast<int>(operation.numbers.front()));
    if (!values.data.empty()) check_values(self, lane, operation, values);
    check_pace(part);
    const auto still = self.in_flight.find(key_of(operation));  // all may have ended while a lane was drained
    if (has_submitted && still != self.in_flight.end()) complete(self, still, std::nullopt);
  }

  // Nobody has anything pending there: its ranks wait for all before they remove it.
  void remove(Rank& self, int set) {
    const auto lane = self.lanes.find(set);
    if (lane != self.lanes.end() && !lane->second->has_ended) drain(self, *lane->second);
    const auto pending = self.in_flight.lower_bound({set, ""});
    if (pending != self.in_flight.end() && pending->first.first == set && !is_anything_amiss())
      story_.find(title_of(pending->second->request->operation) + " of rank " + std::to_string(self.rank) +
                  " is pending when its process set is removed");
    while (true) {
      const auto it = self.in_flight.lower_bound({set, ""});
      if (it == self.in_flight.end() || it->first.first != set) break;
      complete(self, it, Error(ErrorKind::failure, "its process set was removed"));
    }
  }

  void fail(Rank& self, const Lane& lane, const Agreement& part, bool is_first) {
    if (is_first) check_error(self, lane, part);
    const auto it = self.in_flight.find(key_of(part.operation));
    if (it != self.in_flight.end()) complete(self, it, Error(part.error, part.message));
  }

  void complete(Rank& self, std::map<Key, OwnPtr>::iterator it, std::optional<Error> error) {
    const OwnPtr own = it->second;
    for (const auto& [set, lane] : self.lanes) {
      std::deque<OwnPtr>& inbox = lane->inbox;
      inbox.erase(std::remove(inbox.begin(), inbox.end(), own), inbox.end());
      std::vector<Fresh>& taken_in = lane->taken_in;
      taken_in.erase(std::remove_if(taken_in.begin(), taken_in.end(),
                                    [&](const Fresh& one) { return one.request == own->request; }),
                     taken_in.end());
    }
    self.last_tokens[it->first] = own->token;
    self.in_flight.erase(it);
    own->error = std::move(error);
    own->is_done = true;
    trace((own->error ? "fails " : "finishes ") + title_of(own->request->operation));
  }

  void end(Rank& self, Lane& lane, const std::vector<int>& left) {
    while (!lane.backlog.empty()) run_plan(self, lane, *lane.backlog.take().plan, {});
    if (lane.set != 0) return hand_on(self, lane);
    lane.has_ended = true;
    if (!self.is_leaving && std::count(left.begin(), left.end(), self.rank))
      story_.find("rank " + std::to_string(self.rank) + " is said to leave and does not");
    for (const int rank : left)
      if (!ranks_[static_cast<size_t>(rank)]->is_leaving)
        story_.find("rank " + std::to_string(rank) + " is said to leave and does not");
    drain_lanes(self);
    close(self, Error(ErrorKind::shut_down, "a rank has left"));
  }

  // As Engine::has_ended().
  void hand_on(Rank& self, Lane& lane) {
    lane.has_ended = true;
    trace("the lane has ended");
    ++self.bell;
    std::vector<Fresh> pending = lane.coordinator.take_pending();
    for (const OwnPtr& own : lane.inbox) pending.push_back({own->request});
    lane.inbox.clear();
    for (const Fresh& fresh : pending) self.in_flight.at(key_of(fresh.request->operation))->taken_in = 0;
    if (!self.membership.has(lane.set)) return;
    std::vector<Fresh>& taken_in = self.world().taken_in;
    taken_in.insert(taken_in.end(), pending.begin(), pending.end());
  }

  void close(Rank& self, const Error& error) {
    self.has_ended = true;
    self.end_reason = error;
    while (!self.in_flight.empty()) {
      if (error.kind() == ErrorKind::shut_down && !is_anything_amiss())
        story_.find(title_of(self.in_flight.begin()->second->request->operation) + " of rank " +
                    std::to_string(self.rank) + " fails at the end of a healthy job");
      complete(self, self.in_flight.begin(), error);
    }
    trace("the engine has ended");
  }

  // ---- rules

  // Whether no other rank has come to this plan before.
  bool check_same_everywhere(Rank& self, Lane& lane, const Plan& plan) {
    uint64_t signature = 14695981039346656037ull;
    const auto mix = [&](uint64_t value) { signature = (signature ^ value) * 1099511628211ull; };
    for (const AgreementPtr& part : plan.parts) {
      for (const char c : part->operation.name) mix(static_cast<unsigned char>(c));
      mix(static_cast<uint64_t>(part->operation.process_set));
      mix(static_cast<uint64_t>(part->error));
      for (const int rank : part->joined) mix(static_cast<uint64_t>(rank));
      for (const auto& rows : part->rows)
        for (const int64_t row : rows) mix(static_cast<uint64_t>(row));
    }
    // Errors overtake plans that wait, each rank by its own progress, so the two kinds are compared apart.
    const bool is_error = plan.parts.front()->error != ErrorKind::none;
    std::vector<uint64_t>& log = (is_error ? errors_ : plans_)[lane.set];
    uint64_t& place = is_error ? lane.errors : lane.plans;
    const bool is_first = place == log.size();
    if (is_first) log.push_back(signature);
    if (log[place] != signature)
      story_.find("rank " + std::to_string(self.rank) + " carries out " + plan.title + " as plan " +
                  std::to_string(place) + ", another rank something else");
    ++place;
    return is_first;
  }

  // Whether it has carried out the same plan, and may have submitted its operations again.
  static bool is_as_far(const Rank& member, const Lane& lane) { return member.lanes.at(lane.set)->plans >= lane.plans; }

  void check_values(const Rank& self, const Lane& lane, const Operation& operation, const Round::Values& values) {
    const std::vector<int>& members = self.membership.ranks(operation.process_set);
    if (values.are_added_up) {
      const uint64_t sum = std::accumulate(members.begin(), members.end(), uint64_t{0}, [&](uint64_t before, int rank) {
        const Rank& member = *ranks_[static_cast<size_t>(rank)];
        const auto pending = member.in_flight.find(key_of(operation));
        const bool is_done = pending == member.in_flight.end() || (&member != &self && is_as_far(member, lane));
        return before + (is_done ? member.last_tokens.at(key_of(operation)) : pending->second->token);
      });
      if (Tokens::token_of(values.data.front()) != sum)
        story_.find("another sum than that of the values of all ranks for " + operation.name);
      return;
    }
    for (size_t i = 0; i < members.size(); ++i) {
      const Rank& member = *ranks_[static_cast<size_t>(members[i])];
      if (&member != &self && is_as_far(member, lane)) continue;
      const auto pending = member.in_flight.find(key_of(operation));
      if (pending == member.in_flight.end() || pending->second->token != Tokens::token_of(values.data[i]))
        story_.find("another value of rank " + std::to_string(members[i]) + " than the pending one for " +
                    operation.name);
    }
  }

  // Where no rank and no link is slow, an operation ends soon after the last rank has submitted it, or has joined.
  void check_pace(const Agreement& part) {
    const auto is_slow = [](const Fault& fault) { return fault.kind <= Fault::kill || fault.kind >= Fault::slow_link; };
    if (std::any_of(faults_.begin(), faults_.end(), is_slow)) return;
    double last_s = last_submitted_s_[part.operation.name];
    if (!part.joined.empty()) last_s = std::max(last_s, last_submitted_s_[kJoinName]);
    const double seconds = fibres_.now() - last_s;
    if (seconds > kSoon_s + kMessagesOfStep * draw_.delay_most)
      story_.find(title_of(part.operation) + " ends " + std::to_string(seconds) +
                  " s after the last rank has submitted it, or has joined");
  }

  bool is_anything_amiss() const {
    return std::any_of(faults_.begin(), faults_.end(), [&](const Fault& fault) {
      // Several slow links, one after the other, may keep an operation for longer than the limit.
      if (fault.kind == Fault::stop || fault.kind == Fault::slow_link) return draw_.limits.stall_shutdown_s > 0;
      return fault.kind != Fault::mismatch;
    });
  }

  void check_error(const Rank& self, const Lane& lane, const Agreement& part) {
    const std::string what = title_of(part.operation) + " on rank " + std::to_string(self.rank) + ": " + part.message;
    if (part.error == ErrorKind::mismatch && !has_fault(Fault::mismatch) && !has_fault(Fault::only_some) &&
        !has_fault(Fault::crosswise) && part.joined.empty())
      story_.find("a mismatch without a cause: " + what);
    if (part.error == ErrorKind::stalled) {
      // Slow links and stopped ranks may make others wait for as long.
      if (!is_anything_amiss() && !has_fault(Fault::slow_link)) story_.find("a stall without a cause: " + what);
      check_absent(part.message, draw_.limits.stall_shutdown_s, lane, lane.rounds, "a StalledError");
    }
    if (part.error == ErrorKind::deadlock) check_deadlock(what);
  }

  // Every script waits, but those on ranks that have had this error before.
  void check_deadlock(const std::string& what) {
    if (has_seen_deadlock_) return;
    has_seen_deadlock_ = true;
    for (const auto& rank : ranks_)
      if (rank->awaited.empty() && !fibres_.is_killed(rank->rank))
        story_.find("a deadlock although the script of rank " + std::to_string(rank->rank) + " does not wait: " + what);
  }

  // `text` begins with the title of an operation and names the ranks that did not submit it before " did not".
  // `round`: of the lane, in which that was decided.
  void check_absent(const std::string& text, double limit_s, const Lane& lane, uint64_t round,
                    const std::string& kind) {
    const size_t begin = text.find('"'), end = text.find('"', begin + 1), did_not = text.find(" did not");
    if (did_not == std::string::npos) return story_.find(kind + " names nobody: " + text);
    const std::string name = begin > did_not ? "" : text.substr(begin + 1, end - begin - 1);
    const auto is_it = [&](const Key& key, const OwnPtr& own) {
      return name.empty() ? text.find(title_of(own->request->operation)) < did_not : key.second == name;
    };
    const std::vector<int> named = ranks_in(text.substr(0, did_not));
    double oldest = kNever;
    for (const auto& rank : ranks_)
      for (const auto& [key, own] : rank->in_flight)
        if (is_it(key, own)) oldest = std::min(oldest, own->submitted_s);
    if (fibres_.now() - oldest < limit_s - 1e-6)
      story_.find(kind + " after " + std::to_string(fibres_.now() - oldest) + " s: " + text);
    for (const int rank : named) {
      const Rank& other = *ranks_.at(static_cast<size_t>(rank));
      for (const auto& [key, own] : other.in_flight)
        if (is_it(key, own) && own->lane == lane.set && own->taken_in > 0 && own->taken_in <= round)
          story_.find(kind + " names rank " + std::to_string(rank) + ", which has submitted it: " + text);
    }
    told_.insert(named.begin(), named.end());
  }

  // The last "rank 1", "ranks 0, 2-4" or "ranks 0, 2 and 31 more" of the text.
  static std::vector<int> ranks_in(const std::string& text) {
    const size_t begin = text.rfind("rank");
    std::vector<int> ranks;
    for (size_t i = begin; i < text.size();) {
      if (!std::isdigit(static_cast<unsigned char>(text[i]))) {
        ++i;
        continue;
      }
      size_t used = 0;
      const int first = std::stoi(text.substr(i), &used);
      i += used;
      if (text.compare(i, 5, " more") == 0) break;
      int last = first;
      if (i < text.size() && text[i] == '-') {
        last = std::stoi(text.substr(i + 1), &used);
        i += used + 1;
      }
      for (int rank = first; rank <= last; ++rank) ranks.push_back(rank);
    }
    return ranks;
  }

  // News that slow links carry may take their time.
  void check_heard(double since) {
    if (has_fault(Fault::slow_link)) return;
    for (const auto& rank : ranks_)
      if (!rank->has_ended && !fibres_.is_killed(rank->rank) && !fibres_.was_stopped_since(rank->rank, since))
        story_.find("rank " + std::to_string(rank->rank) + " has not heard of a death for " + std::to_string(kHeard_s) +
                    " s");
  }

  void check_end() {
    for (const auto& rank : ranks_) {
      if (rank->has_script_ended || fibres_.is_killed(rank->rank)) continue;
      if (rank->awaited.empty()) continue;  // it is absent, or was never waiting for anybody
      const Operation& operation = rank->awaited.front()->request->operation;
      const std::vector<int> missing = missing_of(operation);
      const std::string what = "rank " + std::to_string(rank->rank) + " waits for " + title_of(operation);
      if (rank->has_ended) {
        story_.find(what + " although its engine has ended");
      } else if (missing.empty()) {
        story_.find(what + ", which every rank has submitted");
      } else if (draw_.limits.stall_shutdown_s > 0) {
        story_.find(what + " longer than the limit");
      } else if (!std::includes(told_.begin(), told_.end(), missing.begin(), missing.end())) {
        story_.find(what + ", and no warning names those that have not submitted it");
      }
    }
  }

  // Ranks of the set that have not submitted it and do not contribute zeros.
  std::vector<int> missing_of(const Operation& operation) const {
    std::vector<int> missing;
    for (const auto& rank : ranks_) {
      if (!rank->membership.contains(operation.process_set, rank->rank)) continue;
      if (rank->membership.has_joined(operation.process_set, rank->rank)) continue;
      if (!rank->in_flight.count(key_of(operation))) missing.push_back(rank->rank);
    }
    return missing;
  }

  // ---- the trace

  void trace(const std::string& text) {
    if (telling_.trace) trace_at(fibres_.running_rank(), fibres_.running_role(), text);
  }
  void trace_at(int rank, const char* role, const std::string& text) {
    if (telling_.trace) std::printf("%12.6f  rank %-3d %-7s %s\n", fibres_.now(), rank, role, text.c_str());
  }

  const Draw& draw_;
  const Telling& telling_;
  Story& story_;
  Random random_;  // of delays and of the next fibre
  std::vector<Fault> faults_;
  std::vector<std::unique_ptr<SimulatedWire>> wires_;
  std::vector<std::unique_ptr<NewsNetwork>> networks_;
  std::vector<std::vector<int>> nodes_;
  std::map<int, std::unique_ptr<Transports>> transports_;  // by process set
  std::vector<std::string> warnings_;
  std::map<std::string, double> last_submitted_s_;
  std::set<int> told_;                                   // the ranks that a warning or an error has named
  std::map<int, std::vector<uint64_t>> plans_, errors_;  // of each lane: signatures, in order
  std::map<std::pair<int, int>, uint64_t> met_;          // by process set and rank: how many plans it has come to
  std::map<std::pair<int, uint64_t>, size_t> come_to_;   // by process set and number: how many ranks
  std::map<uint64_t, std::array<char, kMostValueBytes>> values_;
  std::vector<std::unique_ptr<Tokens>> sums_;
  uint64_t tokens_ = 0;
  bool has_seen_deadlock_ = false, has_heard_of_death_ = false;
  std::vector<std::unique_ptr<Rank>> ranks_;
  Fibres fibres_;  // unwinds what uses all of the above
  Ether ether_;
};

}  // namespace

void warn(const std::string& message) { the_world->note_warning(message); }
void inform(const std::string&) {}
void set_log_level(const std::string&) {}

simulation::Story simulation::tell(uint64_t seed, const Telling& telling) {
  Story story;
  const Draw draw = Drawing(seed).draw();
  World(seed, draw, telling, story).run();
  return story;
}

}  // namespace ringtrain
