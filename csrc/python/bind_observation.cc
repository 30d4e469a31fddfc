// What the engine has done, for those who watch it: history, sums, timeline.
#include "python/bind.h"
#include "runtime/current_engine.h"

namespace ringtrain {
namespace {

nb::list last_operations() {
  nb::list list;
  for (const auto& [submission, progress] : require_engine()->last_operations()) {
    const Operation& operation = submission->operation();
    const auto& site = submission->request->site;
    nb::dict one;
    one["number"] = submission->number;
    one["kind"] = name_of(operation.kind);
    one["name"] = operation.name;
    one["process_set"] = operation.process_set;
    if (operation.kind == OpKind::allreduce || operation.kind == OpKind::reducescatter)
      one["op"] = name_of(operation.op);
    nb::list tensors;
    for (const TensorSpec& tensor : operation.tensors) tensors.append(to_string(tensor));
    one["tensors"] = tensors;
    one["bytes"] = operation.bytes();
    one["is_registered"] = operation.is_registered;
    one["site"] = site ? *site : "";
    one["group"] = progress.group;
    one["error"] = name_of(progress.error);
    one["submitted_s"] = progress.submitted_s;
    one["announced_s"] = progress.announced_s;
    one["agreed_s"] = progress.agreed_s;
    one["begun_s"] = progress.begun_s;
    one["ended_s"] = progress.ended_s;
    list.append(one);
  }
  return list;
}

nb::dict counters() {
  const Coordinator::Counts counts = require_engine()->counts();
  nb::dict all;
  all["rounds"] = counts.rounds;
  all["cache_hits"] = counts.agreed_by_bit;
  all["cache_misses"] = counts.announced;
  all["came_last"] = counts.came_last;
  all["came_with_values"] = counts.came_with_values;
  return all;
}

nb::dict totals() {
  nb::dict kinds;
  for (const auto& [kind, totals] : require_engine()->totals()) {
    nb::dict one;
    one["operations"] = totals.operations;
    one["failed"] = totals.failed;
    one["bytes"] = totals.bytes;
    one["queued_s"] = totals.queued_s;
    one["waiting_s"] = totals.waiting_s;
    one["ready_s"] = totals.ready_s;
    one["working_s"] = totals.working_s;
    kinds[name_of(kind)] = one;
  }
  return kinds;
}

}  // namespace

void bind_observation(nb::module_& module) {
  module.def(
      "start_timeline",
      [](const std::string& path, double start_s, double limit_mb, bool marks_rounds) {
        require_engine()->start_timeline({path, 0, "", start_s, static_cast<size_t>(limit_mb * 1e6), marks_rounds});
      },
      nb::arg("path"), nb::arg("start_s"), nb::arg("limit_mb"), nb::arg("marks_rounds"),
      "Writes what this rank does to a file from now on; start_s on the clock of time.monotonic() is 0 in it.");
  module.def(
      "stop_timeline",
      [] {
        if (const auto engine = current_engine()) engine->stop_timeline();
      },
      "Ends the file, if there is one.");
  module.def(
      "mark",
      [](const std::string& text) {
        if (const auto engine = current_engine()) engine->mark(text);
      },
      nb::arg("text"), "Marks this moment in the timeline, if there is one.");
  module.def("last_operations", &last_operations, "What this rank has done lately and what is pending, as dicts.");
  module.def("counters", &counters, "How much there was to agree on so far.");
  module.def("autotune_findings", &autotune_findings, "Lines of name=value that autotune has found in this process.");
  module.def("totals", &totals, "Sums over all operations of each kind, as dicts.");
}

}  // namespace ringtrain
