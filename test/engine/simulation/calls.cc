// The functions that harness/simulation.py calls. Each function returns null, or what went wrong until the next call of
// this thread.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "crowd.h"
#include "death.h"
#include "runtime/autotune.h"
#include "simulation.h"
#include "steps.h"

using namespace ringtrain;

namespace {

thread_local std::string answer, error;

template <typename Work>
const char* tried(Work work) {
  try {
    work();
    return nullptr;
  } catch (const std::exception& thrown) {
    error = thrown.what();
    return error.c_str();
  }
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    char escaped[8];
    std::snprintf(escaped, sizeof(escaped), c == '"' || c == '\\' || (c >= 0 && c < ' ') ? "\\u%04x" : "%c", c);
    json += escaped;
  }
  return json + "\"";
}

// In brackets, with a comma between them.
template <typename Items, typename Text>
std::string list_of(const Items& items, Text text) {
  std::string list;
  for (const auto& item : items) list += (list.empty() ? "" : ",") + text(item);
  return "[" + list + "]";
}

std::string number_text(int64_t number) { return std::to_string(number); }

std::string part_text(const AgreementPtr& part) {
  const std::vector<int64_t> rows = part->rows.empty() ? std::vector<int64_t>() : part->rows[0];
  return "[" + quoted(part->operation.name) + "," + quoted(part->message) + "," + list_of(rows, number_text) + "," +
         number_text(part->result) + "," + list_of(part->joined, number_text) + "]";
}

std::string round_text(const Round& round) {
  return list_of(round.plans, [](const PlanPtr& plan) { return list_of(plan->parts, part_text); });
}

}  // namespace

extern "C" {

void* request_new(int kind, const char* name, int dtype, const int64_t* shape, size_t dimensions, int op, int root,
                  int process_set, int priority, const int64_t* numbers, size_t count, double prescale) {
  auto request = std::make_shared<Request>();
  Operation& operation = request->operation;
  operation.kind = static_cast<OpKind>(kind);
  operation.name = name;
  if (operation.kind <= OpKind::reducescatter || operation.kind == OpKind::transfer)
    operation.tensors = {{static_cast<DType>(dtype), Shape(shape, shape + dimensions)}};
  operation.op = static_cast<ReduceOp>(op);
  operation.root = root;
  operation.process_set = process_set;
  operation.numbers.assign(numbers, numbers + count);
  operation.factors.prescale = prescale;
  request->priority = priority;
  return new RequestPtr(std::move(request));
}
void request_delete(void* request) { delete static_cast<RequestPtr*>(request); }

void* simulation_new(int size, size_t cache_capacity, size_t fusion_threshold_bytes, double stall_warning_s,
                     double stall_shutdown_s) {
  return new Simulation(size, {cache_capacity, fusion_threshold_bytes, stall_warning_s, stall_shutdown_s});
}
void simulation_delete(void* simulation) { delete static_cast<Simulation*>(simulation); }

const char* simulation_begin(void* simulation, int rank, void* const* requests, size_t count) {
  return tried([&] {
    std::vector<RequestPtr> fresh;
    for (size_t i = 0; i < count; ++i) fresh.push_back(*static_cast<RequestPtr*>(requests[i]));
    static_cast<Simulation*>(simulation)->begin(rank, fresh);
  });
}

// `plans`: JSON, of each rank the plans, of each plan the parts, each [name, message, rows, result, joined].
const char* simulation_finish(void* simulation, double plan_s, const char** plans) {
  return tried([&] {
    answer = list_of(static_cast<Simulation*>(simulation)->finish(plan_s), round_text);
    *plans = answer.c_str();
  });
}

void simulation_say_blocked(void* simulation, int rank, int is_blocked) {
  static_cast<Simulation*>(simulation)->say_blocked(rank, is_blocked != 0);
}
void simulation_answer(void* simulation, int rank, const char* whereabouts) {
  static_cast<Simulation*>(simulation)->answer(rank, whereabouts);
}
void simulation_pass_time(double seconds) { Simulation::pass_time(seconds); }
int simulation_is_due(const void* simulation) { return static_cast<const Simulation*>(simulation)->is_due(); }

size_t simulation_messages(const void* simulation, int rank) {
  return static_cast<const Simulation*>(simulation)->wire(rank).messages_handled();
}
size_t simulation_bytes(const void* simulation, int rank) {
  return static_cast<const Simulation*>(simulation)->wire(rank).bytes_handled();
}

uint64_t simulation_steps() { return steps(); }

void* crowd_new(int size, size_t cache_capacity, double stall_warning_s) {
  Coordinator::Limits limits;
  limits.cache_capacity = cache_capacity;
  limits.stall_warning_s = stall_warning_s;
  return new Crowd(size, limits);
}
void crowd_delete(void* crowd) { delete static_cast<Crowd*>(crowd); }
void crowd_say_blocked(void* crowd) { static_cast<Crowd*>(crowd)->say_blocked(); }

// `requests`: of `kinds` kinds, `counts[kind]` of each, one kind after the other. `repeats`: all ranks know them, and
// there is one kind. `cost`: processor seconds, messages, bytes, bytes of memory, how many were agreed on.
const char* crowd_round(void* crowd, void* const* requests, const size_t* counts, size_t kinds, int repeats,
                        double cost[5]) {
  return tried([&] {
    std::vector<std::vector<RequestPtr>> fresh(kinds);
    for (size_t kind = 0; kind < kinds; ++kind)
      for (size_t i = 0; i < counts[kind]; ++i) fresh[kind].push_back(*static_cast<RequestPtr*>(*requests++));
    Crowd& all = *static_cast<Crowd*>(crowd);
    const Crowd::Cost of_round = repeats ? all.repeat(fresh.front()) : all.settle(fresh);
    cost[0] = of_round.seconds;
    cost[1] = static_cast<double>(of_round.messages);
    cost[2] = static_cast<double>(of_round.bytes);
    cost[3] = static_cast<double>(of_round.peak_bytes);
    cost[4] = static_cast<double>(of_round.agreed);
  });
}

// `cost`: processor seconds, messages, bytes.
const char* death(int size, double cost[3]) {
  return tried([&] {
    const DeathCost of_death = cost_of_death(size);
    cost[0] = of_death.seconds;
    cost[1] = static_cast<double>(of_death.messages);
    cost[2] = static_cast<double>(of_death.bytes);
  });
}

size_t simulation_came_with_values(const void* simulation, int rank) {
  return static_cast<const Simulation*>(simulation)->came_with_values(rank);
}

// Tunes the fusion threshold and the mailboxes of a job whose speed(threshold, mailbox) in bytes per second is given.
// `sizes`: both, before and after. `operations`: how many samples it took. Returns the report.
const char* autotune(size_t sizes[2], const size_t* thresholds, size_t threshold_count, const size_t* mailboxes,
                     size_t mailbox_count, double (*speed)(size_t, size_t), size_t* operations) {
  Tuning now = {sizes[0], sizes[1], 0, 0};
  Autotune tuner(
      now, {{"fusion_threshold_mb", &Tuning::fusion_threshold_bytes, 1, {thresholds, thresholds + threshold_count}},
            {"mailbox_kb", &Tuning::mailbox_bytes, 1, {mailboxes, mailboxes + mailbox_count}}});
  constexpr size_t kBytes = 1 << 20, kMost = 100000;
  const auto apply = [&] {
    if (const std::optional<Tuning> next = tuner.take_proposal()) now = *next;
  };
  for (apply(); !tuner.is_done() && *operations < kMost; apply(), ++*operations)
    tuner.note(kBytes, kBytes / speed(now.fusion_threshold_bytes, now.mailbox_bytes));
  sizes[0] = now.fusion_threshold_bytes;
  sizes[1] = now.mailbox_bytes;
  answer = tuner.report();
  return answer.c_str();
}
}
