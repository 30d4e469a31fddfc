// The end of the process, where MPI may keep it from ending, and the signals that announce it.
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/noted_signals.h"
#include "base/signals.h"
#include "base/thread_annotations.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

// The last resort where a library call may block for ever.
//
// Ends the process after some seconds, whatever its threads are stuck in, unless cancelled before.
class ExitTimer {
 public:
  // `message` is then written to standard error. So is `warning`, after less time.
  ExitTimer(double seconds, std::string message, double warns_after_s = 0, const std::string& warning = "",
            int status = 1);
  // Any thread. Nothing happens from then on.
  void cancel();

 private:
  struct State {
    Mutex mutex;
    std::condition_variable_any has_changed;
    bool is_cancelled GUARDED_BY(mutex) = false;
  };

  // Shared with the timer's thread, which may outlive this.
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

ExitTimer::ExitTimer(double seconds, std::string message, double warns_after_s, const std::string& warning,
                     int status) {
  const bool warns = !warning.empty() && warns_after_s < seconds;
  start_thread([state = state_, seconds, message = std::move(message), pause_s = warns ? warns_after_s : 0, warning,
                status] {
    const Lock lock(state->mutex);
    const auto is_cancelled = [&]() REQUIRES(state->mutex) { return state->is_cancelled; };
    const auto has_waited = [&](double pause_s, const std::string& text) REQUIRES(state->mutex) {
      if (state->has_changed.wait_for(state->mutex, std::chrono::duration<double>(pause_s), is_cancelled)) return false;
      const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
      static_cast<void>(written);
      return true;
    };
    if (pause_s > 0 && !has_waited(pause_s, warning)) return;
    if (has_waited(seconds - pause_s, message)) _exit(status);
  }).detach();
}

void ExitTimer::cancel() {
  const Lock lock(state_->mutex);
  state_->is_cancelled = true;
  state_->has_changed.notify_all();
}

std::atomic<double> exit_limit_s{0};

std::optional<OwnProcess> finalized_by_mpi4py, finalized_here;  // where MPI was initialised; the GIL protects them

// The MPI library that ringtrain has initialised. Constant once it is registered.
struct MpiLibrary {
  int (*is_finalized)(int*);
  int (*finalize)();
} mpi;

constexpr char kLimited[] = "ringtrain: MPI_Finalize waits for other ranks after a failure; not any longer\n";

// Of the functions that Python calls at its end, the one that was registered last runs first: this one before that of
// mpi4py.
void start_exit_timer() {
  constexpr double kChild_s = 2;
  const double limit_s = exit_limit_s;
  if (finalized_here) return;
  if (finalized_by_mpi4py && !finalized_by_mpi4py->is_this())
    ExitTimer(
        kChild_s,
        "ringtrain: this process was forked from a rank, and mpi4py calls MPI_Finalize at its end, which waits for "
        "ever; end forked processes with os._exit(), or call ringtrain.init() before mpi4py.MPI is imported\n");
  else if (limit_s > 0)
    ExitTimer(limit_s, kLimited);
}

void call_at_exit(void (*function)()) {
  if (Py_AtExit(function) != 0) throw failure("too many functions are to be called at the end of Python");
}

void register_exit_timer() {
  static bool is_registered = false;  // the GIL protects it
  if (!is_registered) call_at_exit(&start_exit_timer);
  is_registered = true;
}

void limit_exit(double seconds) {
  exit_limit_s = seconds;
  if (seconds > 0) register_exit_timer();
}

void expect_finalizing_by_mpi4py() {
  finalized_by_mpi4py.emplace();
  register_exit_timer();
}

// Called by exit(), the first to know the exit status: a script that ends by sys.exit(1) has failed, and other ranks
// may never call MPI_Finalize. In a child that was forked from a rank it would wait for ever.
void finalize_mpi(int status, void*) {
  constexpr double kFailed_s = 3;
  int is_finalized = 1;
  if (!finalized_here->is_this() || mpi.is_finalized(&is_finalized) != 0 || is_finalized) return;
  const double limit_s = exit_limit_s > 0 || status == 0 ? exit_limit_s.load() : kFailed_s;
  if (limit_s > 0) ExitTimer(limit_s, kLimited, 0, "", status != 0 ? status : 1);
  mpi.finalize();
}

// Registered at the end of Python, so that exit() calls finalize_mpi() before what libraries have registered.
void finalize_mpi_at_exit_of_process() {
  if (on_exit(&finalize_mpi, nullptr) != 0) finalize_mpi(0, nullptr);
}

void finalize_mpi_at_exit(uintptr_t is_finalized, uintptr_t finalize) {
  mpi = {reinterpret_cast<int (*)(int*)>(is_finalized), reinterpret_cast<int (*)()>(finalize)};
  finalized_here.emplace();
  call_at_exit(&finalize_mpi_at_exit_of_process);
}

}  // namespace

void bind_exit(nb::module_& module) {
  nb::class_<ExitTimer>(module, "ExitTimer",
                        "Ends the process with status 1 after some seconds, even if it is stuck in a library.")
      .def(nb::init<double, std::string, double, const std::string&>(), nb::arg("seconds"), nb::arg("message"),
           nb::arg("warns_after_s") = 0.0, nb::arg("warning") = "")
      .def("cancel", &ExitTimer::cancel);
  module.def("limit_exit", &limit_exit, nb::arg("seconds"),
             "Gives MPI_Finalize so many seconds when Python ends, 0: as many as it takes.");
  module.def("finalize_mpi_at_exit", &finalize_mpi_at_exit, nb::arg("is_finalized"), nb::arg("finalize"),
             "Calls MPI_Finalize when the process ends, unless in a forked child; takes the addresses of MPI_Finalized "
             "and MPI_Finalize. After an exit status other than 0 it may take three seconds.");
  module.def("expect_finalizing_by_mpi4py", &expect_finalizing_by_mpi4py,
             "mpi4py calls MPI_Finalize when Python ends: a forked child, where that hangs, is ended with a message.");
  module.def("note_signal", &note_signal, nb::arg("number"), nb::arg("runs_former"),
             "Has the time noted at which a signal comes, and, if `runs_former`, the handler of before called.");
  module.def("has_default_action", &has_default_action, nb::arg("number"),
             "Returns whether a signal has no handler and is not ignored.");
  module.def("stop_noting_signals", &stop_noting_signals, "Installs the handlers of before.");
  module.def("noted_signals", &noted_signals, "Returns the monotonic time at which each noted signal has come first.");
}

}  // namespace ringtrain
