// Negotiation among simulated ranks, for tests and for the benchmark of negotiation; and tuning of a simulated job.
#include "bench/simulation.h"
#include "python/bind.h"
#include "runtime/autotune.h"

namespace ringtrain {
namespace {

std::shared_ptr<Request> make_request(OpKind kind, std::string name, int dtype, Shape shape, ReduceOp op, int root,
                                      int process_set, int priority, std::vector<int64_t> numbers) {
  auto request = std::make_shared<Request>();
  Operation& operation = request->operation;
  operation.kind = kind;
  operation.name = std::move(name);
  if (kind <= OpKind::reducescatter) operation.tensors = {{static_cast<DType>(dtype), std::move(shape)}};
  operation.op = op;
  operation.root = root;
  operation.process_set = process_set;
  operation.numbers = std::move(numbers);
  request->priority = priority;
  return request;
}

// (name, error message or "", rows of the first tensor, result, joined) of each part of each plan of each rank.
using PartView = std::tuple<std::string, std::string, std::vector<int64_t>, int64_t, std::vector<int>>;

std::vector<std::vector<std::vector<PartView>>> views_of(const std::vector<Round>& rounds) {
  std::vector<std::vector<std::vector<PartView>>> ranks;
  for (const Round& round : rounds) {
    auto& plans = ranks.emplace_back();
    for (const PlanPtr& plan : round.plans) {
      auto& parts = plans.emplace_back();
      for (const AgreementPtr& part : plan->parts)
        parts.emplace_back(part->operation.name, part->message,
                           part->rows.empty() ? std::vector<int64_t>() : part->rows[0], part->result, part->joined);
    }
  }
  return ranks;
}

// Tunes the fusion threshold and the mailboxes of a job whose speed(threshold, mailbox) in bytes per second is given.
// Returns the two sizes in the end, how many samples it took, and the report.
std::tuple<size_t, size_t, size_t, std::string> tune(const Tuning& start, const std::vector<size_t>& thresholds,
                                                     const std::vector<size_t>& mailboxes, const nb::callable& speed) {
  Autotune autotune(start, {{"fusion_threshold_mb", &Tuning::fusion_threshold_bytes, 1, thresholds},
                            {"mailbox_kb", &Tuning::mailbox_bytes, 1, mailboxes}});
  Tuning now = start;
  size_t operations = 0;
  constexpr size_t kBytes = 1 << 20, kMost = 100000;
  const auto apply = [&] {
    if (const std::optional<Tuning> next = autotune.take_proposal()) now = *next;
  };
  for (apply(); !autotune.is_done() && operations < kMost; apply(), ++operations)
    autotune.note(kBytes, kBytes / nb::cast<double>(speed(now.fusion_threshold_bytes, now.mailbox_bytes)));
  return {now.fusion_threshold_bytes, now.mailbox_bytes, operations, autotune.report()};
}

}  // namespace

void bind_simulation(nb::module_& module) {
  module.def(
      "simulate_autotune",
      [](size_t threshold, size_t mailbox, const std::vector<size_t>& thresholds, const std::vector<size_t>& mailboxes,
         const nb::callable& speed) { return tune({threshold, mailbox, 0, 0}, thresholds, mailboxes, speed); },
      nb::arg("threshold"), nb::arg("mailbox"), nb::arg("thresholds"), nb::arg("mailboxes"), nb::arg("speed"),
      "Autotune on a job whose speed(threshold, mailbox) is given: both sizes in the end, operations, the report.");
  nb::class_<Request>(module, "Request", "What one simulated rank announces.")
      .def(nb::new_(&make_request), nb::arg("kind"), nb::arg("name"),
           nb::arg("dtype") = static_cast<int>(DType::float32), nb::arg("shape") = Shape(),
           nb::arg("op") = ReduceOp::sum, nb::arg("root") = 0, nb::arg("process_set") = 0, nb::arg("priority") = 0,
           nb::arg("numbers") = std::vector<int64_t>());
  nb::class_<Simulation>(module, "Simulation", "Coordinators of `size` ranks in this process, over wires in memory.")
      .def(
          "__init__",
          [](Simulation* self, int size, size_t cache_capacity, size_t fusion_threshold_bytes, double stall_warning_s,
             double stall_shutdown_s) {
            new (self) Simulation(size, {cache_capacity, fusion_threshold_bytes, stall_warning_s, stall_shutdown_s});
          },
          nb::arg("size"), nb::arg("cache_capacity") = 1024, nb::arg("fusion_threshold_bytes") = size_t{128} << 20,
          nb::arg("stall_warning_s") = 60.0, nb::arg("stall_shutdown_s") = 600.0)
      .def(
          "round",
          [](Simulation& simulation, const std::vector<std::vector<RequestPtr>>& fresh) {
            return views_of(simulation.round(fresh));
          },
          nb::arg("fresh"), nb::call_guard<nb::gil_scoped_release>(),
          "One round: a list of Requests per rank in, a list of plans per rank out. A plan is a list of (name, error "
          "message, rows, result, ranks that have joined).")
      .def("begin", &Simulation::begin, nb::arg("rank"), nb::arg("fresh"),
           "The first half of a round, on one rank: its Requests.")
      .def(
          "finish", [](Simulation& simulation, double plan_s) { return views_of(simulation.finish(plan_s)); },
          nb::arg("plan_s") = 0.0, nb::call_guard<nb::gil_scoped_release>(),
          "The second half, on all ranks that have begun it: plans as of round(). Each plan keeps the ranks of its "
          "process set for so many seconds.")
      .def("say_blocked", &Simulation::say_blocked, nb::arg("rank"), nb::arg("is_blocked"),
           "That all threads of a rank wait, or that this is over.")
      .def("is_due", &Simulation::is_due, "Whether some rank would come to another round by itself.")
      .def("messages_handled", &Simulation::messages_handled, "Messages sent and received so far, by rank.")
      .def("bytes_handled", &Simulation::bytes_handled, "Their bytes, by rank.");
}

}  // namespace ringtrain
