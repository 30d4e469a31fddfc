// Giving the GIL back and taking it, for threads that may outlive Python.
//
// While Python ends, a thread that asks for the GIL never gets it: Python 3.14 and later stop the thread, earlier
// versions end it with pthread_exit(). That unwinds the stack like an exception, through destructors and other
// functions that are noexcept, and so would abort the process. Such a thread is parked here instead.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace ringtrain {

// Calls `take`, which takes the GIL. Never returns if Python ends first.
template <typename Take>
auto take_or_park(Take take) {
  try {
    return take();
  } catch (...) {  // what pthread_exit() throws must not be left either
    for (;;) pause();
  }
}

// While it lives, this thread does not hold the GIL.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    take_or_park([this] { PyEval_RestoreThread(state_); });
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

// While it lives, this thread holds the GIL, whatever made the thread and whether it held the GIL before.
class TakenGil {
 public:
  TakenGil() : state_(take_or_park([] { return PyGILState_Ensure(); })) {}
  ~TakenGil() { PyGILState_Release(state_); }
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;

 private:
  const PyGILState_STATE state_;
};

}  // namespace ringtrain
