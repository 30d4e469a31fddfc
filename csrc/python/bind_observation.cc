// Observation of the engine: history, sums, timeline, and the stacks of this rank in a stall.
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "base/signals.h"
#include "base/thread_annotations.h"
#include "base/wait.h"
#include "python/bind.h"
#include "runtime/engine.h"

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
// keeps the GIL, such as one inside a library written in C, would delay the answer. Therefore a second thread waits for
// a moment and then raises a signal for itself, whose handler is that of faulthandler: the handler writes all stacks
// without the GIL, and they do not change meanwhile, since no other thread runs Python. Both threads live for one
// question only.

// Where faulthandler writes, what makes it do so, and where the stacks are kept then.
struct StackDump {
  int descriptor, signal;
  std::string folder, file;
};

Mutex stacks_mutex;
PyObject* describe_stacks GUARDED_BY(stacks_mutex) = nullptr;  // kept by us; changes with the GIL, too
std::optional<StackDump> stack_dump GUARDED_BY(stacks_mutex);

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

// The output of the handler of faulthandler.
std::string take_dump(const StackDump& dump) {
  if (ftruncate(dump.descriptor, 0) != 0 || lseek(dump.descriptor, 0, SEEK_SET) != 0) return "";
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, dump.signal);
  pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  pthread_kill(pthread_self(), dump.signal);
  pthread_sigmask(SIG_BLOCK, &only, nullptr);
  std::string text(static_cast<size_t>(lseek(dump.descriptor, 0, SEEK_END)), ' ');
  const ssize_t size = pread(dump.descriptor, text.data(), text.size(), 0);
  text.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return text;
}

// "in load() at train.py:17", of `  File "train.py", line 17 in load`.
std::string place_in(const std::string& line) {
  const std::string before_number = "\", line ", before_name = " in ";
  const size_t file = line.find('"') + 1, number = line.find(before_number), name = line.find(before_name, number);
  if (number == std::string::npos || name == std::string::npos) return "";
  const size_t digits = number + before_number.size();
  const std::string function = line.substr(name + before_name.size());
  std::string path = line.substr(file, number - file);
  std::unique_ptr<char, decltype(&std::free)> folder(getcwd(nullptr, 0), &std::free);
  if (const std::string below = folder ? folder.get() + std::string("/") : "/"; path.rfind(below, 0) == 0)
    path.erase(0, below.size());
  const std::string place = "at " + path + ":" + line.substr(digits, name - digits);
  return function == "<module>" ? place : "in " + function + "() " + place;
}

// The innermost frame of the main thread that is of the script. faulthandler writes the main thread last.
std::string whereabouts_in(const std::string& stacks) {
  const auto is_of_library = [](const std::string& line) {
    for (const char* part : {"/site-packages/", "/lib/python3", "/ringtrain/", "\"<"})
      if (line.find(part) != std::string::npos) return true;
    return false;
  };
  std::istringstream lines(stacks);
  std::string innermost, of_script;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("(most recent call first)") != std::string::npos) innermost = of_script = "";
    if (line.rfind("  File ", 0) != 0) continue;
    if (innermost.empty()) innermost = place_in(line);
    if (of_script.empty() && !is_of_library(line)) of_script = place_in(line);
  }
  return of_script.empty() ? innermost : of_script;
}

void describe_without_gil(const std::string& question) {
  std::string stacks;
  {
    const Lock lock(stacks_mutex);
    if (!stack_dump) return;
    stacks = take_dump(*stack_dump);
    mkdir(stack_dump->folder.c_str(), 0777);
    std::ofstream(stack_dump->file) << "stall: " << question << "\n" << stacks;
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

void set_stacks(PyObject* describe, std::optional<StackDump> dump) {
  const Lock lock(stacks_mutex);
  std::swap(describe_stacks, describe);
  stack_dump = std::move(dump);
  Py_XDECREF(describe);
}

void watch_stalls(nb::object describe, int descriptor, int signal, const std::string& folder, const std::string& file) {
  set_stacks(describe.release().ptr(), StackDump{descriptor, signal, folder, file});
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
  module.def("ignore_stalls", [] { set_stacks(nullptr, std::nullopt); }, "Undoes watch_stalls().");
  module.def("answer_question", &answer_question, nb::arg("whereabouts"),
             "Tells the other ranks where the main thread of this rank is, such as \"in load() at train.py:17\".");
  module.def("last_operations", &last_operations, "The last operations of this rank, and those pending, as dicts.");
  module.def("counters", &counters, "How much there was to agree on so far.");
  module.def("autotune_findings", &autotune_findings, "Lines of name=value that autotune has found in this process.");
  module.def("totals", &totals, "Sums over all operations of each kind, as dicts.");
}

}  // namespace ringtrain
