// The exceptions of ringtrain/errors.py.
#include "base/error.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

// Borrowed from the module, which lives as long as the process. Indexed by ErrorKind.
PyObject* exception_types[10] = {};

PyObject* make_exception(nb::module_& module, ErrorKind kind, const char* name, PyObject* base, const char* doc) {
  PyObject* type = PyErr_NewExceptionWithDoc((std::string("ringtrain.") + name).c_str(), doc, base, nullptr);
  if (!type) throw nb::python_error();
  module.attr(name) = nb::handle(type);
  exception_types[static_cast<int>(kind)] = type;
  return type;
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyErr_SetString(exception_types[static_cast<int>(error.kind())], error.what());
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  exception_types[static_cast<int>(ErrorKind::invalid)] = PyExc_ValueError;
  PyObject* base = make_exception(module, ErrorKind::failure, "RingtrainError", PyExc_RuntimeError,
                                  "An operation over several ranks failed. Horovod's HorovodInternalError.");
  make_exception(module, ErrorKind::mismatch, "MismatchError", base,
                 "The ranks disagree about one operation; the message says who did what. The next one works.");
  make_exception(module, ErrorKind::peer_lost, "PeerLostError", base,
                 "A rank is gone. Every pending and later operation fails with this.");
  make_exception(module, ErrorKind::stalled, "StalledError", base,
                 "Some rank did not come for longer than stall_shutdown_time_s.");
  make_exception(module, ErrorKind::deadlock, "DeadlockError", base,
                 "All ranks wait for operations that some other of them has not submitted. The next one works.");
  make_exception(module, ErrorKind::remote, "RemoteError", base,
                 "Another rank has failed with an exception; the message has its traceback. Nothing works any more.");
  make_exception(module, ErrorKind::shut_down, "ShutDownError", base,
                 "A rank has left the job, so no operation can complete any more.");
  const nb::tuple bases = nb::make_tuple(nb::handle(base), nb::handle(PyExc_ValueError));
  make_exception(module, ErrorKind::not_initialized, "NotInitializedError", bases.ptr(),
                 "Called before init(), after shutdown(), or in a forked child. A ValueError too, as in Horovod.");
  nb::register_exception_translator(translate);
}

}  // namespace ringtrain
