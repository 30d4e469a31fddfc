// The end of the process, where MPI may keep it from ending.
#include <atomic>
#include <memory>

#include "base/error.h"
#include "base/exit_timer.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

std::atomic<double> exit_limit_s{0};

// mpi4py finalises MPI in a function like this one, and of these the last that was registered runs first.
void start_exit_timer() {
  const double limit_s = exit_limit_s;
  if (limit_s > 0)
    ExitTimer(limit_s, "ringtrain: MPI_Finalize waits for other ranks after a failure; not any longer\n");
}

void limit_exit(double seconds) {
  static bool is_registered = false;  // the GIL protects it
  exit_limit_s = seconds;
  if (seconds == 0 || is_registered) return;
  if (Py_AtExit(&start_exit_timer) != 0) throw failure("too many functions are to be called at the end of Python");
  is_registered = true;
}

}  // namespace

void bind_exit(nb::module_& module) {
  nb::class_<ExitTimer>(module, "ExitTimer",
                        "Ends the process with status 1 after some seconds, even if it is stuck in a library.")
      .def(nb::init<double, std::string>(), nb::arg("seconds"), nb::arg("message"))
      .def("cancel", &ExitTimer::cancel);
  module.def("limit_exit", &limit_exit, nb::arg("seconds"),
             "Gives MPI_Finalize so many seconds when Python ends, 0: as many as it takes.");
}

}  // namespace ringtrain
