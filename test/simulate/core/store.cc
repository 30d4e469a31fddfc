// The world of the stores: the real StoreClients of some workers and StoreServers, which push and pull over a simulated
// network or in memory that they share, while messages are slow or lost, links break, and processes stop, die and come
// back.
//
// A worker is a fibre `script`, one for what the scheduler tells it (`seat`), and the threads of its client. A server
// has `serve`, which follows the scheduler and writes snapshots, and its threads. The scheduler is a model: it knows
// who is lost as membership.py does. Its real code has a world of its own (scheduler.py).
//
// Each push adds a power of four of its own to all elements of a key, so that a value says which pushes are in it, and
// how often. Rules. No push is in a value twice, and none that was never made. A push that was acknowledged stays in
// all values from then on, unless its server came back from a snapshot. A chunk is changed as a whole. In the end each
// push to an asynchronous store is in all chunks of a key at a server, or in none, unless that came back from a
// snapshot. In a round each worker that was never lost has pushed once. Later pushes of an expelled worker are in no
// value. A worker may also assign a value, a power of four of its own, which takes the pushes before it away, and none
// that begins once the value is at the server. Versions only grow. An error has a cause, and names only processes that
// were disturbed. In the end every wait has ended.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "base/fork.h"
#include "base/log.h"
#include "fibres.h"
#include "kvstore/server/server.h"
#include "kvstore/worker/client.h"
#include "store/net.h"

namespace ringtrain {

using simulation::Fibres;
using simulation::kNever;
using simulation::Net;
using simulation::Random;
using simulation::Story;
using simulation::Telling;

namespace {

constexpr double kHealed_s = 25, kEnd_s = 160, kSlice_s = 0.25, kSettles_s = 2;
constexpr double kLook_s = 0.2;
constexpr int kMostPushes = 26;  // of a key: powers of four in a float64
constexpr size_t kChunkElements = 16;
constexpr const char* kHasEnded = " has ended";

// ----------------------------------------------------------------------------------------------------- what is drawn

struct Step {
  enum Kind { push, pull, push_pull, refused };
  Kind kind = push;
  std::vector<uint32_t> keys;
  double pause_s = 0;
  bool waits = true;  // before the next step
};

struct Fault {
  enum Kind { stop, kill, kill_scheduler, cut, cut_off, slow, reset, late, refuse };
  Kind kind;
  int rank = 0, other = 0;
  double at = 0, duration = 0;
  double back_s = 0;            // of kill: after which another process has the place; 0: none
  bool in_push = false;         // of kill of a worker: once one of its pushes in shared memory lacks chunks
  std::optional<size_t> after;  // `at` counts from this fault on
  size_t number = 0;
};

std::string text_of(const Fault& fault, int workers) {
  constexpr const char* kNames[] = {"stop", "kill",  "kill scheduler", "cut",   "cut off",
                                    "slow", "reset", "late",           "refuse"};
  const auto name = [&](int rank) {
    return rank < workers ? "worker " + std::to_string(rank) : "server " + std::to_string(rank - workers);
  };
  std::string text = kNames[fault.kind];
  char numbers[80];
  if (fault.kind != Fault::kill_scheduler) text += " " + name(fault.rank);
  if (fault.kind == Fault::cut || fault.kind == Fault::slow || fault.kind == Fault::reset)
    text += " and " + name(fault.other);
  if (fault.kind == Fault::refuse) return text + " in a step";
  std::snprintf(numbers, sizeof(numbers), fault.after ? " %.3f s after fault %zu" : " at %.3f s", fault.at,
                fault.after.value_or(0));
  text += numbers;
  if (fault.in_push) text += " in its next push";
  if (fault.duration > 0) std::snprintf(numbers, sizeof(numbers), ", for %.3f s", fault.duration), text += numbers;
  if (fault.back_s > 0) std::snprintf(numbers, sizeof(numbers), ", back after %.3f s", fault.back_s), text += numbers;
  return text;
}

struct Draw {
  int workers = 2, servers = 1, threads = 1, client_threads = 1;
  bool is_synchronous = false;
  int64_t max_staleness = PartSpec::kNoBound;
  bool assigns = false;             // worker 0, in the middle of its script, the keys that are at one server
  std::vector<bool> shares_memory;  // by rank: whether it is on the host that all such processes share
  std::vector<StoreKey> keys;
  std::vector<std::vector<Step>> scripts;  // by worker
  Net::Weather weather;
  size_t outbox_bytes = 64 << 20;
  double timeout_s = 4, return_s = 0, snapshot_s = 0, notice_s = 0.01;
  std::vector<Fault> faults;
};

class Drawing {
 public:
  explicit Drawing(uint64_t seed)
      : random_(seed),
        has_deaths_in_a_row_(Random(seed ^ kDeathsInARow).chance(1.0 / 12)),
        dies_in_pushes_(Random(seed ^ kDiesInPushes).chance(1.0 / 8)) {
    draw_.outbox_bytes = Random(~seed).one_of(std::vector<size_t>{64 << 20, 400});
    draw_.client_threads = Random(seed ^ kClientThreads).chance(1.0 / 3) ? 2 : 1;
    draw_.assigns = Random(seed ^ kAssigns).chance(1.0 / 6);
  }

  Draw draw() {
    draw_world();
    draw_keys();
    draw_scripts();
    has_deaths_in_a_row_ ? draw_deaths_in_a_row() : draw_faults();
    if (dies_in_pushes_ && !draw_.is_synchronous)
      for (Fault& fault : draw_.faults)
        fault.in_push |= fault.kind == Fault::kill && fault.rank < draw_.workers &&
                         draw_.shares_memory[static_cast<size_t>(fault.rank)];
    if (waits_for_others() && has_returning_worker()) push_all_keys_in_all_steps();
    draw_.assigns = draw_.assigns && !draw_.is_synchronous;
    if (draw_.assigns) add(Fault::reset, 0);  // a value whose answer is lost comes again
    return std::move(draw_);
  }

 private:
  void draw_world() {
    draw_.workers = random_.between(1, 3);
    draw_.servers = random_.between(1, 2);
    draw_.threads = random_.between(1, 2);
    draw_.is_synchronous = random_.chance(0.4);
    if (!draw_.is_synchronous && random_.chance(0.3)) draw_.max_staleness = random_.between(0, 2);
    const double shared = random_.one_of(std::vector<double>{0, 0, 0.5, 1});
    for (int i = 0; i < draw_.workers + draw_.servers; ++i) draw_.shares_memory.push_back(random_.chance(shared));
    draw_.weather.least_s = random_.real(1e-5, 1e-3);
    draw_.weather.most_s = draw_.weather.least_s + random_.real(0, random_.chance(0.5) ? 0.002 : 0.1);
    draw_.weather.room_bytes = random_.one_of(std::vector<size_t>{300, 2000, 1 << 20});
    draw_.weather.timeout_s = draw_.timeout_s;
    draw_.return_s = random_.chance(0.5) ? random_.real(2, 10) : 0;
    draw_.snapshot_s = random_.chance(0.7) ? random_.real(0.2, 3) : 0;
    draw_.notice_s = random_.real(1e-3, 0.2);
    if (!has_deaths_in_a_row_) return;
    draw_.workers = std::max(draw_.workers, 2);
    draw_.servers = 2;
    draw_.is_synchronous = false;
    draw_.max_staleness = PartSpec::kNoBound;
    draw_.shares_memory.assign(static_cast<size_t>(draw_.workers + draw_.servers), true);
    draw_.return_s = random_.real(4, 10);
  }

  void draw_keys() {
    const int count = random_.between(1, 2);
    for (int id = 0; id < count; ++id) {
      StoreKey key = {static_cast<uint32_t>(id), "k" + std::to_string(id), DType::float64, 0, {}};
      const bool is_cut = draw_.servers > 1 && (random_.chance(0.5) || has_deaths_in_a_row_);
      for (int server = 0; server < draw_.servers; ++server) {
        if (!is_cut && server != id % draw_.servers) continue;
        const auto elements = static_cast<uint64_t>(random_.between(1, 40));
        key.pieces.push_back({server, key.count, elements});
        key.count += elements;
      }
      draw_.keys.push_back(key);
    }
  }

  bool waits_for_others() const { return draw_.is_synchronous || draw_.max_staleness != PartSpec::kNoBound; }

  // Workers that wait for each other push the same keys in the same order.
  void draw_scripts() {
    const int steps = random_.between(2, kMostPushes / (draw_.workers + 2));
    const double pause_s = random_.one_of(std::vector<double>{0.001, 0.1, 0.6});
    std::vector<Step> common;
    for (int i = 0; i < steps; ++i) common.push_back(draw_step());
    for (int worker = 0; worker < draw_.workers; ++worker) {
      std::vector<Step> script = common;
      for (Step& step : script) {
        if (!waits_for_others()) step = draw_step();
        step.pause_s = random_.real(0, pause_s);
        step.waits = random_.chance(0.7);
      }
      draw_.scripts.push_back(std::move(script));
    }
  }

  bool has_returning_worker() const {
    return std::any_of(draw_.faults.begin(), draw_.faults.end(), [&](const Fault& fault) {
      return fault.kind == Fault::kill && fault.rank < draw_.workers && fault.back_s > 0;
    });
  }

  // A worker that comes back begins its script again, and is in another step than the others. That they do not wait for
  // each other without end is up to the script: none waits for another in a key before it has pushed the other keys.
  void push_all_keys_in_all_steps() {
    for (std::vector<Step>& script : draw_.scripts)
      for (Step& step : script) {
        step.keys.clear();
        for (const StoreKey& key : draw_.keys) step.keys.push_back(key.id);
      }
  }

  Step draw_step() {
    Step step;
    step.kind = random_.one_of(std::vector<Step::Kind>{Step::push, Step::pull, Step::push_pull, Step::push_pull});
    for (const StoreKey& key : draw_.keys)
      if (random_.chance(0.7)) step.keys.push_back(key.id);
    if (step.keys.empty()) step.keys.push_back(0);
    return step;
  }

  double rate() { return random_.one_of(std::vector<double>{0, 0, 0, 0.3, 1}); }
  int worker() { return random_.below(draw_.workers); }
  int server() { return draw_.workers + random_.below(draw_.servers); }
  double time() { return random_.real(0, random_.chance(0.5) ? 1 : 8); }

  void draw_faults() {
    std::array<double, Fault::refuse + 1> rates;
    for (double& one : rates) one = rate();
    const double most = random_.one_of(std::vector<double>{0, 1, 2, 4});
    for (int kind = Fault::stop; kind <= Fault::refuse; ++kind)
      for (int i = 0; i < most; ++i)
        if (random_.chance(rates[static_cast<size_t>(kind)])) add(static_cast<Fault::Kind>(kind), i);
  }

  // A worker dies in a push in shared memory, and a server with it. The next process of the worker dies, too, mostly
  // before another server goes on with the memory.
  void draw_deaths_in_a_row() {
    const int dies_twice = worker(), dies_once = server();
    const auto add_kill = [&](int rank, double at, double back_s) -> Fault& {
      Fault fault = {Fault::kill, rank};
      fault.at = at;
      fault.back_s = draw_.notice_s + back_s;
      fault.number = draw_.faults.size();
      if (fault.number > 0) fault.after = 0;
      draw_.faults.push_back(fault);
      return draw_.faults.back();
    };
    add_kill(dies_twice, random_.real(0, 1), random_.real(1e-3, 0.1)).in_push = true;
    add_kill(dies_once, random_.real(0, draw_.notice_s), random_.real(0.1, 3));
    add_kill(dies_twice, draw_.faults.front().back_s + random_.real(0, 0.5), random_.real(1e-3, 0.5));
  }

  void add(Fault::Kind kind, int count) {
    Fault fault = {kind};
    fault.at = time();
    const bool is_of_server = random_.chance(0.5);
    fault.rank = is_of_server ? server() : worker();
    const double seconds = random_.real(0.01, random_.chance(0.5) ? 2 : 12);
    switch (kind) {
      case Fault::stop:
      case Fault::cut_off:
        fault.duration = seconds;
        break;
      case Fault::kill:
        if (random_.chance(0.6)) fault.back_s = random_.real(0.05, 5);
        // Two die at once.
        if (count > 0 && !draw_.faults.empty() && random_.chance(0.5))
          fault.at = draw_.faults.back().at + random_.real(-0.01, 0.01);
        break;
      case Fault::kill_scheduler:
        if (count > 0 || random_.chance(0.7)) return;
        break;
      case Fault::slow:
      case Fault::cut:
        fault.duration = seconds;
        [[fallthrough]];
      case Fault::reset:
        fault.rank = worker();
        fault.other = server();
        break;
      case Fault::late:
        fault.duration = random_.real(0, 3);
        fault.at = 0;
        break;
      case Fault::refuse:
        if (waits_for_others()) return;
        fault.rank = worker();
        break;
    }
    fault.at = std::max(0.0, fault.at);
    fault.number = draw_.faults.size();
    draw_.faults.push_back(fault);
  }

  // With which no seed of kept.txt has another story.
  static constexpr uint64_t kDeathsInARow = uint64_t{21} << 40, kClientThreads = uint64_t{146911} << 32,
                            kAssigns = uint64_t{410504} << 36, kDiesInPushes = uint64_t{18} << 36;

  Random random_;
  const bool has_deaths_in_a_row_, dies_in_pushes_;
  Draw draw_;
};

// ------------------------------------------------------------------------------------------------------------ the
// world

struct Push {
  int rank;  // of the process
  uint32_t key;
  double begun_at, acknowledged_at = kNever;
  bool has_failed = false;
  bool assigns = false;            // its key, whose pushes before it are gone
  std::set<size_t> assigned = {};  // what was assigned to the key, and there when this push began
};

// The content of a snapshot of one part.
struct SavedPart {
  uint32_t store;
  Bytes description, chunks;
};

struct Snapshot {
  double at = 0;
  std::vector<SavedPart> parts;
};

// A process of a worker or of a server: its rank is its alone, its place may have had another one before.
struct Process {
  int rank = 0, number = 0;  // of its place
  bool is_worker = false, is_recovery = false;
  uint32_t term = 0;
  bool is_lost = false;                              // for the scheduler
  bool is_told_off = false;                          // it knows that it has no part in the job any more
  bool is_over = false;                              // it has ended by itself
  bool is_announced = false;                         // all have heard that it is lost
  bool has_joined = false;                           // it has no more data
  int64_t join = 0;                                  // the number of this join
  std::optional<std::map<uint32_t, int64_t>> ended;  // joins of its round, once that is over
  std::string waits_for;
  std::deque<std::function<void()>> notices;
  double noticed_at = 0;
  std::unique_ptr<StoreClient> client;
  std::unique_ptr<StoreServer> server;
  std::vector<StoreClient::SharedPart> shared;  // as the directory has it
  std::map<int, double> heard_back;             // of servers: when it has heard of the last return
  std::map<int, double> fenced;                 // of a server: by worker's rank, since when its pushes do not count
  std::deque<std::vector<double>> kept;         // arrays of requests that servers still carry out
};

void nobody_interrupts() {}

class World {
 public:
  World(uint64_t seed, const Draw& draw, const Telling& telling, Story& story)
      : draw_(draw),
        telling_(telling),
        story_(story),
        random_(seed ^ 0x9e3779b97f4a7c15),
        fibres_(story, random_, kMostRanks),
        net_(fibres_, random_, draw_.weather, kMostRanks),
        slots_(draw.keys.size()),
        snapshots_(static_cast<size_t>(draw.servers)) {
    for (const Fault& fault : draw.faults) story.faults.push_back(text_of(fault, draw.workers));
  }

  ~World() {
    fibres_.end();
    processes_.clear();
  }

  void run() {
    for (int i = 0; i < draw_.workers + draw_.servers; ++i) start(i < draw_.workers, place_of_first(i), late_s(i));
    for (const Fault& fault : draw_.faults)
      if (is_told(fault)) plan(fault);
    for (double until = kSlice_s; until < kEnd_s && !is_over(); until += kSlice_s) {
      fibres_.run(until);
      if (!story_.finding.empty()) return;
    }
    require_ends();
    // Servers finish what a dead worker has begun once they hear of its death. Faults may still strike meanwhile.
    is_settling_ = true;
    for (double end = 0; story_.finding.empty() && end < disturbed_until_ + kSettles_s;) {
      end = std::max(fibres_.now(), disturbed_until_) + kSettles_s;
      fibres_.run(end);
    }
    if (story_.finding.empty()) require_values();
  }

 private:
  static constexpr int kMostRanks = 24;
  static constexpr double kBetweenLooks_s = 4e-4;  // less than a worker waits between chunks

  bool is_told(const Fault& fault) const { return telling_.left_out.count(fault.number) == 0; }
  int place_of_first(int rank) const { return rank < draw_.workers ? rank : rank - draw_.workers; }
  double late_s(int rank) const {
    double seconds = 0;
    for (const Fault& fault : draw_.faults)
      if (fault.kind == Fault::late && fault.rank == rank && is_told(fault)) seconds = fault.duration;
    return seconds;
  }

  // ------------------------------------------------------------------------------------------------------ processes

  std::string name_of(const Process& process) const {
    return (process.is_worker ? "worker " : "server ") + std::to_string(process.number);
  }
  Process& process(int rank) { return *processes_[static_cast<size_t>(rank)]; }
  // The last one of a place.
  Process* of_place(bool is_worker, int number) {
    Process* last = nullptr;
    for (const auto& one : processes_)
      if (one->is_worker == is_worker && one->number == number) last = one.get();
    return last;
  }
  bool runs(const Process& process) const { return !process.is_over && !fibres_.is_killed(process.rank); }
  bool is_shared(const Process& process) const {
    return draw_
        .shares_memory[static_cast<size_t>(process.is_worker ? process.number : draw_.workers + process.number)];
  }

  void start(bool is_worker, int number, double late_s, bool is_recovery = false) {
    if (processes_.size() == kMostRanks) return;
    auto made = std::make_unique<Process>();
    Process& process = *made;
    process.rank = static_cast<int>(processes_.size());
    process.number = number;
    process.is_worker = is_worker;
    process.is_recovery = is_recovery;
    if (const Process* const before = of_place(is_worker, number)) process.term = before->term + 1;
    processes_.push_back(std::move(made));
    if (!is_worker) net_.open_port(process.rank);
    fibres_.start(process.rank, "script", [this, &process, late_s] {
      if (late_s > 0) fibres_.pause(late_s);
      is_worker_guarded(process);
    });
  }

  void is_worker_guarded(Process& process) {
    if (const auto error = error_of([&] { process.is_worker ? work(process) : serve(process); })) {
      say(process, std::string("ends of ") + ringtrain::name_of(error->kind()) + ": " + error->what());
      require_cause(process, *error);
      disturbed_.insert(name_of(process));
      leave(process);
    }
    process.is_over = true;
    process.waits_for.clear();
  }

  // A process ends of an error: its connections end, and the scheduler hears of it.
  void leave(Process& process) {
    process.is_over = true;
    net_.kill(process.rank);
    lose(process, "it has failed");
  }

  void kill(Process& process) {
    if (!runs(process)) return;
    trace("fault", name_of(process) + " is killed");
    fibres_.kill(process.rank);
    net_.kill(process.rank);
    fibres_.at(fibres_.now() + draw_.notice_s, [this, &process] { lose(process, "it has died"); });
  }

  // -------------------------------------------------------------------------------------- the scheduler, as a model

  void tell(Process& to, std::function<void()> notice) {
    if (to.is_lost || !runs(to)) return;
    to.noticed_at = std::max(to.noticed_at, fibres_.now() + random_.real(0, draw_.notice_s));
    fibres_.at(to.noticed_at, [&to, notice] { to.notices.push_back(notice); });
  }
  template <typename Notice>
  void tell_all(bool workers, bool servers, Notice notice) {
    for (const auto& one : processes_)
      if (one->is_worker ? workers : servers) tell(*one, [notice, to = one.get()] { notice(*to); });
  }

  void lose(Process& process, const std::string& why) {
    if (process.is_lost || is_scheduler_dead_) return;
    process.is_lost = true;
    disturbed_.insert(name_of(process));
    trace("model", "the scheduler has lost " + name_of(process) + ": " + why);
    if (process.is_worker) tell_all(false, true, [this, &process](Process& to) { fence(to, process); });
    if (!process.is_worker || draw_.return_s == 0) return announce(process, why);
    fibres_.at(fibres_.now() + draw_.return_s, [this, &process, why] {
      if (of_place(process.is_worker, process.number) == &process) announce(process, why);
    });
  }

  void fence(Process& server, const Process& worker) {
    if (!server.server) return;
    server.server->lost(worker.number, worker.term + 1);
    server.fenced.try_emplace(worker.rank, fibres_.now());
  }

  void announce(Process& process, const std::string& why) {
    if (is_scheduler_dead_) return;
    process.is_announced = true;
    const std::string text = name_of(process) + " has died: " + why;
    if (process.is_worker)
      tell_all(true, true, [this, &process, text](Process& to) {
        if (to.client) to.client->lost(process.number, text, process.term + 1);
        if (to.server) fence(to, process);
      });
    else
      tell_all(true, false, [&process, text](Process& to) {
        if (to.client) to.client->lost_server(process.number, text);
      });
  }

  // Nothing was heard of it for too long, though it may run again.
  void expel(Process& process) {
    if (process.is_lost || is_scheduler_dead_ || !runs(process)) return;
    lose(process, "it has said nothing");
    end_part(process, "was expelled after a silence");
  }

  void end_part(Process& process, const std::string& text) {
    process.notices.push_back([this, &process, text] {
      say(process, "hears that it " + text);
      process.is_told_off = true;
      if (process.client) process.client->end(name_of(process) + " " + text, ErrorKind::peer_lost);
    });
  }

  void kill_scheduler() {
    trace("fault", "the scheduler is killed");
    is_scheduler_dead_ = true;
    for (const auto& one : processes_) {
      disturbed_.insert(name_of(*one));  // each ends of it
      if (runs(*one)) end_part(*one, "has lost the scheduler");
    }
  }

  // Another process in the place of one that is lost.
  void come_back(bool is_worker, int number) {
    Process& before = *of_place(is_worker, number);
    if (is_settling_ || is_scheduler_dead_ || !before.is_lost || (is_worker && !has_keys_)) return;
    if (!is_worker && draw_.return_s == 0) return;
    start(is_worker, number, 0, true);
    Process& process = *of_place(is_worker, number);
    trace("model", name_of(process) + " comes again, term " + std::to_string(process.term));
    if (!is_worker) return;
    tell_all(true, true, [&process](Process& to) {
      if (to.client && &to != &process) to.client->back(process.number);
      if (to.server) to.server->back(process.number, process.term);
    });
  }

  // ---------------------------------------------------------------------------------------------------------- faults

  void plan(const Fault& fault) {
    if (!fault.after || !is_told(draw_.faults[*fault.after])) fibres_.at(fault.at, [this, fault] { strike(fault); });
  }

  // Whether the last push of a worker in shared memory is not in all chunks, but in `fewest` at least.
  bool is_in_push(const Process& worker, size_t fewest) {
    const auto number = static_cast<size_t>(worker.number);
    for (const auto& one : processes_)
      for (const StoreKey& key : draw_.keys) {
        if (!one->server || !runs(*one)) continue;
        const auto part = one->server->stores().table()->find(0, key.id).part;
        if (!part || part->layout().stage_bytes() == 0) continue;
        const StageRecord& record = part->stage(number);
        if (!StageState{record.state.load()}.is_published()) continue;
        size_t there = 0, missing = 0;
        for (size_t chunk = part->layout().first_chunk(record.piece);
             chunk < part->layout().first_chunk(record.piece + 1); ++chunk) {
          const WorkerRecord& of_worker = part->worker(chunk, number);
          if (of_worker.term == record.term) ++(of_worker.pushes < record.seq ? missing : there);
        }
        if (missing > 0 && there >= fewest) return true;
      }
    return false;
  }

  void disturb(int rank) { disturbed_.insert(name_of(*of_rank(rank))); }
  // The process in the place that this rank had at the beginning.
  Process* of_rank(int rank) { return of_place(rank < draw_.workers, place_of_first(rank)); }

  void strike(const Fault& fault) {
    Process& process = *of_rank(fault.rank);
    const double until = std::min(fibres_.now() + fault.duration, kHealed_s);
    disturbed_until_ = std::max(disturbed_until_, until);
    if (fault.in_push && runs(process) && !is_in_push(process, fault.number % 2)) {
      fibres_.at(fibres_.now() + kBetweenLooks_s, [this, fault] { strike(fault); });
      return;
    }
    for (const Fault& next : draw_.faults)
      if (next.after == fault.number && is_told(next))
        fibres_.at(fibres_.now() + next.at, [this, next] { strike(next); });
    switch (fault.kind) {
      case Fault::kill:
        if (!runs(process)) return;
        disturb(fault.rank);
        kill(process);
        if (fault.back_s > 0)
          fibres_.at(fibres_.now() + fault.back_s,
                     [this, is_worker = process.is_worker, number = process.number] { come_back(is_worker, number); });
        break;
      case Fault::kill_scheduler:
        kill_scheduler();
        break;
      case Fault::stop:
        if (!runs(process)) return;
        disturb(fault.rank);
        trace("fault", name_of(process) + " is stopped");
        fibres_.stop(process.rank, until);
        expel_if_silent(process, until);
        break;
      case Fault::cut_off:
        if (!runs(process)) return;
        disturb(fault.rank);
        trace("fault", name_of(process) + " is cut off");
        net_.cut(process.rank, -1, until);
        for (int rank = 0; rank < draw_.workers + draw_.servers; ++rank) mark_cut(process.rank, rank);
        expel_if_silent(process, until);
        break;
      case Fault::cut:
        trace("fault", name_of(process) + " and " + name_of(*of_rank(fault.other)) + " do not reach each other");
        mark_cut(process.rank, fault.other);
        disturb(fault.rank);
        disturb(fault.other);
        net_.cut(process.rank, of_rank(fault.other)->rank, until);
        break;
      case Fault::slow:
        disturb(fault.rank);
        disturb(fault.other);
        net_.slow_down(process.rank, of_rank(fault.other)->rank, until, 1.5);
        break;
      case Fault::reset:
        trace("fault", "the connections of " + name_of(process) + " and " + name_of(*of_rank(fault.other)) + " end");
        net_.reset(process.rank, of_rank(fault.other)->rank);
        break;
      case Fault::late:
      case Fault::refuse:
        break;
    }
  }

  void mark_cut(int, int other) { disturb(other); }

  void expel_if_silent(Process& process, double until) {
    const double silent_at = fibres_.now() + draw_.timeout_s + random_.real(0, 0.5);
    if (silent_at < until) fibres_.at(silent_at, [this, &process] { expel(process); });
  }

  // --------------------------------------------------------------------------------------------------------- a worker

  void work(Process& self) {
    StoreClientOptions options;
    options.workers = draw_.workers;
    options.node = is_shared(self) ? "host" : "";
    RemoteOptions& remote = options.remote;
    remote.worker = self.number;
    remote.capacity = draw_.workers;
    remote.term = self.term;
    for (int server = 0; server < draw_.servers; ++server)
      remote.servers.push_back({{"server", of_place(false, server)->rank}});
    remote.outbox_bytes = draw_.outbox_bytes;
    remote.threads = draw_.client_threads;
    remote.timeout_s = draw_.timeout_s;
    remote.return_s = draw_.return_s;
    remote.verbose = telling_.trace ? 2 : 0;
    self.client = std::make_unique<StoreClient>(options, &nobody_interrupts);
    StoreClient& client = *self.client;
    for (const auto& one : processes_)
      if (one->is_worker && one->is_announced && one->number != self.number && of_place(true, one->number) == one.get())
        client.lost(one->number, name_of(*one) + " has died before", one->term + 1);
    for (const auto& one : processes_)
      if (one->is_worker && one->is_over && one->has_joined && of_place(true, one->number) == one.get())
        hear_end(self, *one);
    fibres_.start(self.rank, "seat", [this, &self] { follow(self); });
    self.waits_for = "all servers";
    client.meet();
    client.open(0, draw_.is_synchronous, draw_.max_staleness);
    begin_keys(self);
    if (draw_.servers > 0 && self.number == 0 && !self.is_recovery) has_keys_ = true;
    run_script(self);
    // Others do not wait for a worker that has no more data.
    self.waits_for = "joining";
    self.join = client.join(0);
    self.has_joined = true;
    self.waits_for = "the others to join";
    fibres_.wait([&] { return self.is_told_off || is_round_over(self); });
    self.waits_for = "leaving the joins";
    client.resume(0, self.ended ? *self.ended : joins());
    self.waits_for.clear();
    self.is_over = true;
    say(self, "is done");
    tell_all(true, true, [this, &self](Process& to) {
      hear_end(to, self);
      if (to.server) to.server->left(self.number);
    });
  }

  // A round that is over is so for all workers in it, also for one that hears of it after another worker has come back.
  bool is_round_over(const Process& self) {
    if (self.ended || !have_all_joined()) return self.ended.has_value();
    const auto all = joins();
    for (const auto& one : processes_)
      if (one->has_joined && !one->ended) one->ended = all;
    return true;
  }

  bool have_all_joined() {
    for (int number = 0; number < draw_.workers; ++number) {
      const Process& one = *of_place(true, number);
      if (!one.has_joined && !one.is_over && !one.is_announced) return false;
    }
    return true;
  }

  std::map<uint32_t, int64_t> joins() {
    std::map<uint32_t, int64_t> all;
    for (int number = 0; number < draw_.workers; ++number)
      if (const Process& one = *of_place(true, number); one.has_joined) all[static_cast<uint32_t>(number)] = one.join;
    return all;
  }

  void hear_end(Process& to, const Process& of) {
    if (to.client && &to != &of) to.client->lost(of.number, name_of(of) + kHasEnded, of.term + 1);
  }

  void follow(Process& self) {
    while (true) {
      fibres_.wait([&self] { return !self.notices.empty(); });
      const auto notice = std::move(self.notices.front());
      self.notices.pop_front();
      notice();
    }
  }

  void begin_keys(Process& self) {
    StoreClient& client = *self.client;
    RuleWords rule;
    rule.name = "test";
    rule.form = "mxnet";
    rule.numbers = {{"rescale_grad", 1.0}};
    if (self.number == 0 && !self.is_recovery) {
      self.waits_for = "its keys";
      std::vector<std::vector<double>> zeros;
      std::vector<HostArray> values;
      for (const StoreKey& key : draw_.keys) {
        zeros.emplace_back(key.count);
        values.push_back({zeros.back().data(), DType::float64, key.count});
      }
      client.create_keys(0, draw_.keys, values);
      client.set_rule(0, rule, true);
    } else {
      self.waits_for = "the keys of worker 0";
      const auto may_go_on = [&] { return has_keys_ || self.is_told_off || of_place(true, 0)->is_lost; };
      fibres_.wait(may_go_on);
      if (!has_keys_) throw Error(ErrorKind::peer_lost, "nobody gives keys");
      client.attach_keys(0, draw_.keys);
      client.set_rule(0, rule, false);
    }
    publish(self);
  }

  void publish(Process& self) {
    for (auto& part : self.client->take_shared_parts()) self.shared.push_back(std::move(part));
  }

  struct UnderWay {
    std::shared_ptr<StoreHandle> handle;
    std::vector<size_t> pushes;                            // in pushes_
    std::vector<uint32_t> pulled;                          // keys
    std::vector<std::vector<double>> values, outs;         // of the keys
    std::map<uint32_t, std::vector<size_t>> acknowledged;  // before it began, by key: of this process
    std::map<uint32_t, int> own;                           // by key: how many pushes of this process are before it
  };

  void run_script(Process& self) {
    std::deque<UnderWay> under_way;
    try {
      go_through(self, draw_.scripts[static_cast<size_t>(self.number)], under_way);
    } catch (...) {
      // As Python does: the arrays of a call that has raised are kept as long as the client says.
      for (UnderWay& one : under_way) {
        const auto requests = one.handle ? one.handle : self.client->take_abandoned();
        if (!requests || requests->is_memory_free()) continue;
        std::move(one.values.begin(), one.values.end(), std::back_inserter(self.kept));
        std::move(one.outs.begin(), one.outs.end(), std::back_inserter(self.kept));
      }
      throw;
    }
  }

  void go_through(Process& self, const std::vector<Step>& script, std::deque<UnderWay>& under_way) {
    size_t refused_at = script.size();
    for (const Fault& fault : draw_.faults)
      if (fault.kind == Fault::refuse && fault.rank == self.number && is_told(fault))
        refused_at = fault.number % script.size();
    for (size_t i = 0; i < script.size(); ++i) {
      if (script[i].pause_s > 0) fibres_.pause(script[i].pause_s);
      if (i == refused_at) push_what_is_refused(self, script[i].keys.front());
      if (draw_.assigns && self.number == 0 && i == script.size() / 2) assign(self);
      under_way.emplace_back();
      begin(self, script[i], under_way.back());
      if (!script[i].waits && i + 1 < script.size()) continue;
      for (; !under_way.empty(); under_way.pop_front()) finish(self, under_way.front());
    }
  }

  void push_what_is_refused(Process& self, uint32_t key) {
    const std::vector<uint32_t> codes(64);
    const Pushed pushed = {{const_cast<uint32_t*>(codes.data()), DType::float64, draw_.keys[key].count},
                           {0, 0},
                           {Quantizer::Kind::two_bit, 0.5}};
    say(self, "pushes what is refused");
    self.waits_for = "a push that is refused";
    const auto error = error_of([&] {
      const auto handle = self.client->push(0, {key}, {pushed}, 0, true);
      while (!self.client->wait(*handle, kLook_s)) {
      }
    });
    if (!error) return story_.find("codes for a key of float64 were not refused");
    if (error->kind() != ErrorKind::invalid) throw Error(*error);
  }

  void assign(Process& self) {
    for (const StoreKey& key : draw_.keys) {
      if (key.pieces.size() > 1 || slots_[key.id].size() == kMostPushes) continue;
      const size_t number = add_push(self, key.id);
      pushes_[number].assigns = true;
      say(self, "assigns " + key.name + " slot " + std::to_string(slots_[key.id].size() - 1));
      self.waits_for = "an assignment";
      std::vector<double> value(key.count, std::ldexp(1.0, 2 * static_cast<int>(slots_[key.id].size() - 1)));
      const auto error =
          error_of([&] { self.client->assign(0, {key.id}, {{value.data(), DType::float64, key.count}}); });
      if (!error) {
        pushes_[number].acknowledged_at = fibres_.now();
        continue;
      }
      pushes_[number].has_failed = true;
      self.kept.push_back(std::move(value));  // servers may still carry it out
      throw Error(*error);
    }
  }

  size_t add_push(const Process& self, uint32_t key) {
    const size_t number = pushes_.size();
    pushes_.push_back({self.rank, key, fibres_.now()});
    pushes_.back().assigned = assigned_now(key);
    slots_[key].push_back(number);
    return number;
  }

  // Assignments that are in all chunks of a key at one server.
  std::set<size_t> assigned_now(uint32_t key) {
    std::set<size_t> found;
    const std::vector<double> values = values_at(draw_.keys[key].pieces.front().server, key);
    for (size_t slot = 0; slot < slots_[key].size(); ++slot) {
      const auto has_it = [&](double value) { return (static_cast<uint64_t>(value) >> 2 * slot & 3) > 0; };
      if (pushes_[slots_[key][slot]].assigns && std::all_of(values.begin(), values.end(), has_it))
        found.insert(slots_[key][slot]);
    }
    return found;
  }

  // Of the first element of each chunk, without a change that a dead process has left unfinished.
  std::vector<double> values_at(int server, uint32_t key) {
    std::vector<double> values;
    Process& one = *of_place(false, server);
    const PartTable::Place place = one.server ? one.server->stores().table()->find(0, key) : PartTable::Place();
    if (!place.part) return values;
    const Layout& layout = place.part->layout();
    for (size_t chunk = layout.first_chunk(place.piece); chunk < layout.first_chunk(place.piece + 1); ++chunk) {
      const HeldChunk held(*place.part, chunk, layout.actor_of_server());
      values.push_back(*reinterpret_cast<const double*>(place.part->value(chunk)));
    }
    return values;
  }

  // Whether an assignment may have taken a push away: one of which the server did not have all when the push began.
  bool may_be_gone(size_t number) const {
    const Push& push = pushes_[number];
    const auto takes_it = [&](size_t other) {
      return other != number && pushes_[other].assigns && push.assigned.count(other) == 0;
    };
    return std::any_of(slots_[push.key].begin(), slots_[push.key].end(), takes_it);
  }

  void begin(Process& self, const Step& step, UnderWay& one) {
    StoreClient& client = *self.client;
    std::vector<Pushed> pushed;
    std::vector<HostArray> outs;
    const bool pushes = step.kind != Step::pull, pulls = step.kind != Step::push;
    std::string text = std::string(pushes ? "pushes" : "") + (pulls ? "pulls" : "");
    one.values.reserve(step.keys.size());
    one.outs.reserve(step.keys.size());
    for (const uint32_t id : step.keys) {
      const StoreKey& key = draw_.keys[id];
      for (const size_t number : slots_[id])
        if (pushes_[number].rank == self.rank && !pushes_[number].has_failed) one.acknowledged[id].push_back(number);
      if (pushes) {
        if (slots_[id].size() == kMostPushes) return;
        one.values.emplace_back(key.count, std::ldexp(1.0, 2 * static_cast<int>(slots_[id].size())));
        pushed.push_back({{one.values.back().data(), DType::float64, key.count}, {1, 0}, {}});
        text += " k" + std::to_string(id) + " slot " + std::to_string(slots_[id].size());
        const size_t number = add_push(self, id);
        one.pushes.push_back(number);
        one.acknowledged[id].push_back(number);
      }
      if (pulls) {
        one.outs.emplace_back(key.count, -1.0);
        outs.push_back({one.outs.back().data(), DType::float64, key.count});
        one.pulled.push_back(id);
      }
    }
    say(self, text);
    self.waits_for = "beginning: " + text;
    const bool copies = step.waits;
    try {
      if (step.kind == Step::push) one.handle = client.push(0, step.keys, pushed, 0, copies);
      if (step.kind == Step::pull) one.handle = client.pull(0, step.keys, outs, 0);
      if (step.kind == Step::push_pull) one.handle = client.push_pull(0, step.keys, pushed, outs, 0);
    } catch (const Error&) {
      for (const size_t push : one.pushes) pushes_[push].has_failed = true;
      throw;
    }
  }

  void finish(Process& self, UnderWay& one) {
    if (!one.handle) return;
    self.waits_for = one.pulled.empty() ? "a push" : "a pull";
    try {
      while (!self.client->wait(*one.handle, kLook_s)) {
      }
    } catch (const Error&) {
      for (const size_t push : one.pushes) pushes_[push].has_failed = true;
      throw;
    }
    for (const size_t push : one.pushes) pushes_[push].acknowledged_at = fibres_.now();
    for (size_t i = 0; i < one.pulled.size(); ++i) check(self, one, draw_.keys[one.pulled[i]], one.outs[i]);
    publish(self);
    check_version(self, one);
  }

  // --------------------------------------------------------------------------------------------------------- a server

  void serve(Process& self) {
    self.waits_for.clear();
    ServerOptions options;
    options.number = self.number;
    options.capacity = draw_.workers;
    options.listeners.push_back(Descriptor::listening_at(self.rank));
    options.threads = draw_.threads;
    options.node = is_shared(self) ? "host" : "";
    options.timeout_s = draw_.timeout_s;
    options.verbose = telling_.trace ? 2 : 0;
    self.server = std::make_unique<StoreServer>(std::move(options));
    if (self.is_recovery) take_over(self);
    double due = fibres_.now() + draw_.snapshot_s;
    while (!self.is_told_off) {
      fibres_.wait([&self] { return !self.notices.empty(); }, fibres_.now() + kLook_s);
      for (; !self.notices.empty(); self.notices.pop_front()) self.notices.front()();
      if (draw_.snapshot_s == 0 || fibres_.now() < due) continue;
      save(self);
      due = fibres_.now() + draw_.snapshot_s;
    }
    self.server->close();
    throw Error(ErrorKind::peer_lost, name_of(self) + " has no part in its job any more");
  }

  void save(Process& self) {
    Snapshot snapshot;
    snapshot.at = fibres_.now();
    ServerStores& stores = self.server->stores();
    const auto parts = stores.parts();
    for (size_t i = 0; i < parts.size(); ++i)
      snapshot.parts.push_back({parts[i].first, stores.describe(i), stores.copy(i, 0, parts[i].second)});
    snapshots_[static_cast<size_t>(self.number)] = std::move(snapshot);
  }

  void take_over(Process& self) {
    std::map<uint32_t, ServerStores::Found> found;
    for (const auto& one : processes_)
      if (one->is_worker && !one->is_lost && runs(*one) && is_shared(self))
        for (const StoreClient::SharedPart& part : one->shared)
          if (part.server == self.number)
            found[part.number] = {part.store, part.number, part.spec, kPidOfRank0 + one->rank, part.ticket};
    std::vector<ServerStores::Found> all;
    for (const auto& [number, one] : found) all.push_back(one);
    self.server->stores().begin_recovery();
    // All stores are one here, so the parts are numbered from 0 on.
    const bool can_keep = !all.empty() && all.back().number + 1 == all.size();
    const bool keeps = !all.empty() && !error_of([&] { self.server->stores().adopt(all); });
    if (!keeps) {
      const auto& snapshot = snapshots_[static_cast<size_t>(self.number)];
      if (!snapshot) throw invalid("another server cannot come in the place of a lost one without a snapshot");
      for (size_t i = 0; i < snapshot->parts.size(); ++i) {
        self.server->stores().restore(snapshot->parts[i].store, snapshot->parts[i].description);
        self.server->stores().put(i, 0, snapshot->parts[i].chunks);
      }
      if (!can_keep) restored_[self.number] = fibres_.now();
    }
    for (int worker = 0; worker < draw_.workers; ++worker) {
      Process& one = *of_place(true, worker);
      if (one.is_lost || one.is_over)
        fence(self, one);
      else
        self.server->back(worker, one.term);
    }
    say(self, keeps ? "goes on with the memory of its workers" : "goes on from a snapshot");
    const int number = self.number, port = self.rank;
    if (self.is_lost || is_scheduler_dead_) return;
    tell_all(true, false, [this, number, port, keeps](Process& to) {
      if (!to.client) return;
      to.client->back_server(number, {{"server", port}}, keeps);
      to.heard_back[number] = fibres_.now();
    });
  }

  // ----------------------------------------------------------------------------------------------------------- checks

  // How often each push of a key is in a value; empty where the value is no sum of pushes.
  std::vector<int> digits_of(double value, size_t pushes) const {
    std::vector<int> digits;
    if (!(value >= 0) || value != std::floor(value) || value >= 0x1p53) return {};
    auto rest = static_cast<uint64_t>(value);
    for (size_t i = 0; i < pushes; ++i, rest >>= 2) digits.push_back(static_cast<int>(rest & 3));
    return rest == 0 ? digits : std::vector<int>();
  }

  std::string name_of_push(uint32_t key, size_t slot) {
    const Push& push = pushes_[slots_[key][slot]];
    char time[40];
    std::snprintf(time, sizeof(time), " of %.3f s", push.begun_at);
    return "the push " + std::to_string(slot) + " of " + name_of(process(push.rank)) + " to key k" +
           std::to_string(key) + time;
  }

  bool may_be_missing(const Push& push, int server) {
    const auto restored = restored_.find(server);
    if (restored == restored_.end()) return false;
    const auto& heard = process(push.rank).heard_back;
    const auto back = heard.find(server);
    // It was in the server before, or on its way to it.
    const bool has_heard = back != heard.end() && back->second >= restored->second;
    return !has_heard || push.begun_at <= back->second || draw_.is_synchronous;
  }

  // In rounds, a worker in the place of one that died takes the numbers of those pushes that this one did not bring to
  // an end, or that a server of the key has lost with a snapshot. Chunks that have them drop its own.
  bool has_others_instead(const StoreKey& key, const std::vector<int>& digits, const Process& self) {
    if (!draw_.is_synchronous) return false;
    int missing = 0, others = 0;
    const bool is_restored = std::any_of(key.pieces.begin(), key.pieces.end(), [&](const StoreKey::Piece& piece) {
      return restored_.count(piece.server) > 0;
    });
    for (size_t slot = 0; slot < digits.size(); ++slot) {
      const Push& push = pushes_[slots_[key.id][slot]];
      const Process& its = process(push.rank);
      if (its.number != self.number) continue;
      const bool is_at_all_servers = push.acknowledged_at < kNever && !is_restored;
      if (its.term < self.term && !is_at_all_servers && digits[slot] > 0) ++others;
      if (its.term > 0 && push.acknowledged_at < kNever && digits[slot] == 0) ++missing;
    }
    return std::max(missing, 1) <= others;
  }

  template <typename Check>
  void for_chunks(const StoreKey& key, const std::vector<double>& value, Check check) {
    for (const StoreKey::Piece& piece : key.pieces)
      for (uint64_t begin = 0; begin < piece.count; begin += kChunkElements) {
        const uint64_t end = std::min<uint64_t>(begin + kChunkElements, piece.count);
        for (uint64_t i = begin; i < end; ++i)
          if (value[piece.begin + i] != value[piece.begin + begin])
            return story_.find("a chunk of key " + key.name + " is half changed");
        check(piece.server, value[piece.begin + begin]);
      }
  }

  // Checks what holds for each value, wherever it is seen. `is_current`: it cannot be in the memory of a lost server,
  // which an expelled worker may still share.
  std::vector<int> checked_digits(const StoreKey& key, int server, double value, bool is_current) {
    const std::vector<int> digits = digits_of(value, slots_[key.id].size());
    if (digits.empty() && !slots_[key.id].empty()) {
      story_.find("key " + key.name + " has a value that is no sum of pushes: " + std::to_string(value));
      return {};
    }
    for (size_t slot = 0; slot < digits.size(); ++slot) {
      const Push& push = pushes_[slots_[key.id][slot]];
      if (digits[slot] > 1)
        story_.find(name_of_push(key.id, slot) + " is counted " + std::to_string(digits[slot]) + " times");
      if (digits[slot] == 0 || !is_current) continue;
      for (const auto& one : processes_) {
        if (one->is_worker || one->number != server || fibres_.is_killed(one->rank)) continue;
        const auto fenced = one->fenced.find(push.rank);
        if (fenced != one->fenced.end() && fenced->second < push.begun_at && of_place(false, server) == one.get())
          story_.find(name_of_push(key.id, slot) + " is counted, although it was expelled before");
      }
    }
    return digits;
  }

  void check(Process& self, const UnderWay& one, const StoreKey& key, const std::vector<double>& value) {
    const auto own = one.acknowledged.find(key.id);
    for_chunks(key, value, [&](int server, double of_chunk) {
      const std::vector<int> digits = checked_digits(key, server, of_chunk, !self.is_lost);
      if (digits.empty()) return;
      for (size_t slot = 0; slot < digits.size(); ++slot) {
        const size_t number = slots_[key.id][slot];
        const bool is_own =
            own != one.acknowledged.end() && std::count(own->second.begin(), own->second.end(), number) > 0;
        if (is_own && digits[slot] == 0 && !pushes_[number].has_failed && !may_be_gone(number) &&
            !may_be_missing(pushes_[number], server) && !has_others_instead(key, digits, process(pushes_[number].rank)))
          story_.find(name_of_push(key.id, slot) + " is not in what its worker pulls");
      }
      if (draw_.is_synchronous) check_round(self, key, server, digits);
    });
  }

  // Rounds close with all workers: those that were never lost are in it equally often.
  void check_round(Process&, const StoreKey& key, int server, const std::vector<int>& digits) {
    if (restored_.count(server)) return;
    std::map<int, int> times;
    for (const auto& one : processes_)
      if (one->is_worker && one->term == 0 && !one->is_lost && !fibres_.is_killed(one->rank)) times[one->rank] = 0;
    for (size_t slot = 0; slot < digits.size(); ++slot)
      if (const auto found = times.find(pushes_[slots_[key.id][slot]].rank); found != times.end())
        found->second += digits[slot];
    for (const auto& [rank, count] : times)
      if (count != times.begin()->second)
        story_.find("a round of key " + key.name + " was closed without " + name_of(process(rank)));
  }

  void check_version(Process& self, const UnderWay& one) {
    for (const uint32_t key : one.pulled) {
      const int64_t version = self.client->num_updates(0, {key}).front();
      int64_t& before = versions_[{self.rank, key}];
      if (version < before && restored_.empty())
        story_.find("the version of key " + draw_.keys[key].name + " falls from " + std::to_string(before) + " to " +
                    std::to_string(version));
      before = version;
    }
  }

  // An error names only who was disturbed.
  void require_cause(const Process& self, const Error& error) {
    if (error.kind() == ErrorKind::invalid && self.is_recovery && !self.is_worker) return;  // it has no snapshot
    const std::string text = error.what();
    // Another process is stopped in the middle of a change, or between two of the messages that are about one.
    const bool is_stalled = error.kind() == ErrorKind::stalled && text.find(" has been in the middle") < text.npos;
    if (error.kind() != ErrorKind::peer_lost && !is_stalled)
      return story_.find(name_of(self) + " has " + ringtrain::name_of(error.kind()) + ": " + text);
    if (disturbed_.empty()) return story_.find(name_of(self) + " has an error without a cause: " + text);
    for (const char* const role : {"worker ", "server "})
      for (int number = 0; number < 3; ++number) {
        const std::string name = role + std::to_string(number);
        if (text.find(name) != std::string::npos && !disturbed_.count(name) &&
            text.find(name + kHasEnded) == std::string::npos)
          story_.find("an error of " + name_of(self) + " names " + name + ", which was not disturbed: " + text);
      }
  }

  bool is_over() const {
    bool waits = false;
    for (const auto& one : processes_) waits = waits || (one->is_worker && runs(*one));
    return !waits;
  }

  void require_ends() {
    std::string waiting;
    for (const auto& one : processes_)
      if (one->is_worker && runs(*one))
        waiting += (waiting.empty() ? "" : "; ") + name_of(*one) + " waits for " + one->waits_for;
    if (!waiting.empty()) story_.find("without an end: " + waiting);
  }

  // The values of the servers in the end.
  void require_values() {
    for (const StoreKey& key : draw_.keys)
      for (const StoreKey::Piece& piece : key.pieces) {
        Process& one = *of_place(false, piece.server);
        if (!runs(one) || !one.server) continue;
        const std::vector<double> values = values_at(piece.server, key.id);
        for (const double value : values) require_value(key, one, value);
        if (values.empty()) continue;
        if (!draw_.is_synchronous && !one.is_lost && !restored_.count(one.number)) require_whole(key, one, values);
      }
  }

  // Each push is in all chunks of a key at a server, or in none. A value is assigned chunk by chunk.
  void require_whole(const StoreKey& key, const Process& server, const std::vector<double>& values) {
    const size_t pushes = slots_[key.id].size();
    const std::vector<int> first = digits_of(values.front(), pushes);
    for (const double value : values) {
      const std::vector<int> digits = digits_of(value, pushes);
      for (size_t slot = 0; slot < std::min(first.size(), digits.size()); ++slot)
        if (first[slot] != digits[slot] && !pushes_[slots_[key.id][slot]].assigns && !may_be_gone(slots_[key.id][slot]))
          story_.find(name_of_push(key.id, slot) + " is in some chunks of " + name_of(server) + " only");
    }
  }

  void require_value(const StoreKey& key, Process& server, double value) {
    const std::vector<int> digits = checked_digits(key, server.number, value, true);
    for (size_t slot = 0; slot < digits.size(); ++slot) {
      const Push& push = pushes_[slots_[key.id][slot]];
      const bool is_acknowledged = push.acknowledged_at < kNever;
      if (is_acknowledged && digits[slot] == 0 && !may_be_gone(slots_[key.id][slot]) &&
          !may_be_missing(push, server.number) && !draw_.is_synchronous &&
          !has_others_instead(key, digits, process(push.rank)))
        story_.find(name_of_push(key.id, slot) + " was acknowledged, and is lost");
    }
  }

  // ------------------------------------------------------------------------------------------------------------ trace

  void say(const Process& process, const std::string& text) { trace(name_of(process).c_str(), text); }
  void trace(const char* who, const std::string& text) {
    if (telling_.trace) std::printf("%12.6f  %-9s %s\n", fibres_.now(), who, text.c_str());
  }

  const Draw& draw_;
  const Telling& telling_;
  Story& story_;
  Random random_;
  Fibres fibres_;
  Net net_;
  std::vector<std::unique_ptr<Process>> processes_;  // by rank
  std::vector<Push> pushes_;
  std::vector<std::vector<size_t>> slots_;  // by key: its pushes, in the order of their powers of four
  std::vector<std::optional<Snapshot>> snapshots_;
  std::map<int, double> restored_;  // servers that came back from a snapshot: when the last one did
  std::map<std::pair<int, uint32_t>, int64_t> versions_;
  std::set<std::string> disturbed_;  // names of processes
  double disturbed_until_ = 0;       // by faults that last
  bool has_keys_ = false, is_scheduler_dead_ = false, is_settling_ = false;
};

}  // namespace

void warn(const std::string&) {}
void inform(const std::string& text) {
  // Only a story that is traced is told so much.
  std::printf("%12.6f  %s\n", Fibres::current().now(), text.c_str());
}

simulation::Story simulation::tell(uint64_t seed, const Telling& telling) {
  Story story;
  const Draw draw = Drawing(seed).draw();
  World(seed, draw, telling, story).run();
  return story;
}

}  // namespace ringtrain
