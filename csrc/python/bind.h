// Shared by the parts of the module ringtrain._core. Only this folder knows Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "record/handle.h"
#include "runtime/submission_builder.h"

namespace ringtrain {

// Calls of Python's C API in threads that may outlive Python.
//
// While Python ends, a thread that asks for the GIL never gets it, and each function that runs code of Python may ask
// for it at any moment. Python 3.14 and later stop the thread, earlier versions end it with pthread_exit(). That
// unwinds the stack like an exception, through destructors and other functions that are noexcept, and so would abort
// the process; a destructor that gives the GIL back would do so, too. Such a thread is parked here instead. So whatever
// takes the GIL or runs code of Python in a thread of the core, or while a thread of Python waits in the core, does it
// in here. `call` uses the C API alone: what it throws does not come out.
template <typename Call>
auto call_or_park(Call call) {
  try {
    return call();
  } catch (...) {  // what pthread_exit() throws must not be left either
    for (;;) pause();
  }
}

// While it lives, this thread does not hold the GIL.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    call_or_park([this] { PyEval_RestoreThread(state_); });
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* const state_;
};

// While it lives, this thread holds the GIL, whatever made the thread and whether it held the GIL before.
class TakenGil {
 public:
  TakenGil() : state_(call_or_park([] { return PyGILState_Ensure(); })) {}
  ~TakenGil() {
    call_or_park([this] { PyGILState_Release(state_); });  // destroys what Python keeps for the thread
  }
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;

 private:
  const PyGILState_STATE state_;
};

// With the GIL. Whether a signal handler has raised an exception, now or before, which Python then keeps.
inline bool has_signal_raised() {
  return call_or_park([] { return PyErr_Occurred() || PyErr_CheckSignals() != 0; });
}

// A place in the user's code from which operations are submitted.
//
// Shared by the requests that come from there.
struct Site {
  std::shared_ptr<const std::string> text;
};

namespace nb = nanobind;

// A Handle as Python has it. As a value it costs less than a shared_ptr, which nanobind keeps in a table of its own:
// one is made of every gradient.
struct SharedHandle {
  std::shared_ptr<Handle> handle;
  CudaStream stream = nullptr;  // on a GPU: in which the values of the first tensor were made

  // Once it is done, on a GPU: a stream waits for the result, the host does not. Whether it is the one above: then
  // memory of it that is freed now is used again only after the operation. Throws the error of one that failed.
  bool follow(CudaStream follower) const;
};

inline Engine::Caller caller_that(bool is_awaited) {
  return is_awaited ? Engine::Caller::waits : Engine::Caller::goes_on;
}

// With the GIL, which it releases. Whether the Handle is done, after at most so many seconds. Throws the error with
// which its operation ended, if it did, and what a signal handler raises. `give_up_s`: as for Engine::wait.
bool wait_for(Handle& handle, double timeout_s, double give_up_s);

// A tensor as Python describes it: (address, dtype, shape), and of one on a GPU also (..., device, stream).
TensorView to_view(const nb::tuple& tuple);

// Where an array is, if it is on this device, is dense and writable and its elements are these. Of an object with the
// buffer protocol, or of what Python tells of a tensor.
std::optional<TensorPlace> place_of_same(nb::handle object, const TensorSpec& spec, int device);

// A NumPy array of bytes that keeps the memory alive.
nb::object array_of_bytes(std::shared_ptr<char> memory, size_t bytes);

void bind_errors(nb::module_& module);
void bind_words(nb::module_& module);        // dtypes, kinds of operations, options
void bind_buffer(nb::module_& module);       // memory of arrays
void bind_engine(nb::module_& module);       // init, shutdown, submit, wait
void bind_in_place(nb::module_& module);     // operations on one array that repeat, as of gradients
void bind_observation(nb::module_& module);  // history, sums, timeline
void bind_exit(nb::module_& module);         // the end of the process
void bind_handle(nb::module_& module);
void bind_gpu(nb::module_& module);      // drivers and GPUs
void bind_kernels(nb::module_& module);  // optimizers, codes of gradients
void bind_store_server(nb::module_& module);
void bind_store_client(nb::module_& module);
void bind_mxnet(nb::module_& module);  // operations of MXNet's engine
void bind_xla(nb::module_& module);    // what JAX registers
void bind_bench(nb::module_& module);  // what only measurements need

}  // namespace ringtrain
