// Observation of the engine: history, sums, timeline, the stacks of this rank in a stall, and questions from outside.
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/fork.h"
#include "base/json.h"
#include "base/signals.h"
#include "base/thread_annotations.h"
#include "base/wait.h"
#include "network/answering.h"
#include "python/bind.h"
#include "python/stacks.h"
#include "record/step_log.h"
#include "runtime/engine.h"
#include "runtime/status.h"

namespace ringtrain {
namespace {

nb::list last_operations() {
  nb::list list;
  for (const auto& [submission, progress] : require_engine()->last_operations()) {
    const Operation& operation = submission->operation();
    const auto& site = submission->request->site;
    const auto& title = submission->request->title;
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
    if (title) one["title"] = *title;
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
  all["rounds_on_node"] = require_engine()->rounds_on_node();
  all["cache_hits"] = counts.agreed_by_bit;
  all["cache_misses"] = counts.announced;
  all["came_last"] = counts.came_last;
  all["came_with_values"] = counts.came_with_values;
  all["exposed_s"] = require_engine()->exposed_s();
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
    kinds[kind.c_str()] = one;
  }
  return kinds;
}

// ------------------------------------------------------------------------------------------ the stacks of this rank
//
// When all ranks are asked where their threads are, a thread calls a function of Python that tells it. A thread that
// keeps the GIL would delay the answer. Therefore a second thread waits for a moment and then takes the stacks without
// it (stacks.h). Both threads live for one question only.

// Where stacks are written that were taken without the GIL.
struct StackFile {
  std::string folder, file;
};

Mutex stacks_mutex;
PyObject* describe_stacks GUARDED_BY(stacks_mutex) = nullptr;  // kept by us; changes with the GIL, too
std::optional<StackFile> stack_file GUARDED_BY(stacks_mutex);

void answer_question(const std::string& whereabouts) {
  if (const std::shared_ptr<Engine> engine = current_engine()) engine->answer(whereabouts);
}

void describe_with_gil(const std::string& question) {
  PyObject* describe = nullptr;
  {
    const Lock lock(stacks_mutex);
    Py_XINCREF(describe = describe_stacks);
  }
  if (!describe) return;
  call_or_park([describe, &question] {
    PyObject* result = PyObject_CallFunction(describe, "s", question.c_str());
    if (!result) PyErr_WriteUnraisable(describe);
    Py_XDECREF(result);
    Py_DECREF(describe);
  });
}

void describe_without_gil(const std::string& question) {
  std::string stacks;
  {
    const Lock lock(stacks_mutex);
    if (!stack_file) return;
    stacks = dump_stacks();
    mkdir(stack_file->folder.c_str(), 0777);
    std::ofstream(stack_file->file) << "stall: " << question << "\n" << stacks;
  }
  const std::string place = whereabouts_in(stacks);
  answer_question((place.empty() ? "in a library" : place) + ", where it keeps the GIL");
}

void on_question(const std::string& question) {
  constexpr double kPatience_s = 0.5;
  const auto has_gil = std::make_shared<std::atomic<bool>>(false);
  start_thread([has_gil, question] {
    const TakenGil gil;
    *has_gil = true;
    describe_with_gil(question);
  }).detach();
  start_thread([has_gil, question] {
    if (!Waiter::comes_true([&] { return has_gil->load(); }, kPatience_s)) describe_without_gil(question);
  }).detach();
}

// ------------------------------------------------------------------------------------------ questions from outside

// Never destroyed: a process that ends without shutdown() leaves its threads alone.
std::shared_ptr<Answering>& answering = *new std::shared_ptr<Answering>;  // changes with the GIL

std::string answer_to(const std::string& request, int rank, double since_s, const std::map<int, int>& pids_of_host) {
  if (request == R"("status")") return status_text(rank, since_s);
  if (request == R"("states")") return states_text(pids_of_host);
  if (request != R"("stacks")") return R"({"error":"unknown request"})";
  const Stacks stacks = stacks_now();
  const std::string place = whereabouts_in(stacks.text);
  return R"({"rank":)" + std::to_string(rank) + R"(,"whereabouts":)" + quoted(place) + R"(,"is_gil_kept":)" +
         (stacks.is_gil_kept ? "true" : "false") + R"(,"full_disks":)" + full_disks_text() + R"(,"stacks":)" +
         quoted(stacks.text) + "}";
}

void start_answering(int listener, const nb::bytes& secret, int rank, const std::map<int, int>& pids_of_host) {
  answering = owned_here(new Answering(
      Descriptor(listener), {secret.c_str(), secret.size()},
      [=, since_s = now_s()](const std::string& request) { return answer_to(request, rank, since_s, pids_of_host); }));
}

void stop_answering() {
  std::shared_ptr<Answering> ending = std::exchange(answering, nullptr);
  const ReleasedGil release;  // an answer that is under way may wait for it
  ending.reset();
}

void set_stacks(PyObject* describe, std::optional<StackFile> file) {
  const Lock lock(stacks_mutex);
  std::swap(describe_stacks, describe);
  stack_file = std::move(file);
  Py_XDECREF(describe);
}

void watch_stalls(nb::object describe, int descriptor, int signal, const std::string& folder, const std::string& file) {
  set_stack_signal(StackSignal{descriptor, signal});
  set_stacks(describe.release().ptr(), StackFile{folder, file});
  require_engine()->on_question(&on_question);
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
  module.def(
      "watch_stalls", &watch_stalls, nb::arg("describe"), nb::arg("descriptor"), nb::arg("signal"), nb::arg("folder"),
      nb::arg("file"),
      "When all ranks are asked where their threads are, since an operation waits for long, calls a function with "
      "the question, which should call answer_question(). If a thread keeps the GIL from that, raises a signal "
      "whose handler writes all stacks to a descriptor, and writes them to a file.");
  module.def(
      "ignore_stalls",
      [] {
        set_stacks(nullptr, std::nullopt);
        set_stack_signal(std::nullopt);
      },
      "Undoes watch_stalls().");
  module.def("start_answering", &start_answering, nb::arg("listener"), nb::arg("secret"), nb::arg("rank"),
             nb::arg("pids_of_host"),
             "Tells all who connect to the listener, whose descriptor it takes over, and know the secret what this "
             "rank does, until stop_answering(). pids_of_host: the processes of this host, by rank.");
  module.def("stop_answering", &stop_answering);
  module.def("note_step", &note_step, nb::arg("count"), "A step begins, the one of this number.");
  module.def("answer_question", &answer_question, nb::arg("whereabouts"),
             "Tells the other ranks where the main thread of this rank is, such as \"in load() at train.py:17\".");
  module.def("last_operations", &last_operations, "The last operations of this rank, and those pending, as dicts.");
  module.def("counters", &counters, "How much there was to agree on so far.");
  module.def("autotune_findings", &autotune_findings, "Lines of name=value that autotune has found in this process.");
  module.def("totals", &totals, "Sums over all operations of each kind, as dicts.");
}

}  // namespace ringtrain
