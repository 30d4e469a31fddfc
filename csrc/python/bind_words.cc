// Enumerations and the option table.
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/options.h"
#include "base/sha256.h"
#include "coordination/operation.h"
#include "kernels/reduce.h"
#include "network/sealing.h"
#include "network/tcp.h"
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

std::string as_string(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyErr_SetString(exception_types[static_cast<int>(error.kind())], error.what());
  }
}

nb::list option_table() {
  nb::list table;
  for (const OptionInfo& info : Options::table()) {
    nb::dict row;
    row["name"] = info.name;
    row["alias"] = info.alias;
    row["alias_factor"] = info.alias_factor;
    row["type"] = info.type;
    if (info.type == "number")
      row["default"] = info.default_number;
    else
      row["default"] = info.choices.empty() ? "" : info.choices.front();
    row["minimum"] = info.minimum;
    row["maximum"] = info.maximum;
    row["choices"] = info.choices;
    row["meaning"] = info.meaning;
    table.append(row);
  }
  return table;
}

}  // namespace

// The exceptions of ringtrain/errors.py.

void bind_errors(nb::module_& module) {
  exception_types[static_cast<int>(ErrorKind::invalid)] = PyExc_ValueError;
  PyObject* base = make_exception(module, ErrorKind::failure, "RingtrainError", PyExc_RuntimeError,
                                  "An operation over several ranks failed. Horovod's HorovodInternalError.");
  make_exception(
      module, ErrorKind::mismatch, "MismatchError", base,
      "The ranks disagree about one operation; the message says which rank did what. Later operations work.");
  make_exception(module, ErrorKind::peer_lost, "PeerLostError", base,
                 "A rank is gone. Every pending and later operation fails with this.");
  make_exception(module, ErrorKind::stalled, "StalledError", base,
                 "A rank did not take part for longer than stall_shutdown_time_s.");
  make_exception(
      module, ErrorKind::deadlock, "DeadlockError", base,
      "Every rank waits for an operation that another waiting rank has not submitted. Later operations work.");
  make_exception(
      module, ErrorKind::remote, "RemoteError", base,
      "Another rank has failed with an exception; the message has its traceback. Later operations fail, too.");
  make_exception(module, ErrorKind::shut_down, "ShutDownError", base,
                 "A rank has left the job, so no operation can complete any more.");
  const nb::tuple bases = nb::make_tuple(nb::handle(base), nb::handle(PyExc_ValueError));
  make_exception(module, ErrorKind::not_initialized, "NotInitializedError", bases.ptr(),
                 "Called before init(), after shutdown(), or in a forked child. A ValueError too, as in Horovod.");
  nb::register_exception_translator(translate);
}

void bind_words(nb::module_& module) {
  nb::dict dtypes;
  for (int i = 0; i < kDTypes; ++i) dtypes[name_of(static_cast<DType>(i))] = i;
  module.attr("DTYPES") = dtypes;

  nb::enum_<OpKind>(module, "OpKind", "The kind of an operation.")
      .value("ALLREDUCE", OpKind::allreduce)
      .value("ALLGATHER", OpKind::allgather)
      .value("BROADCAST", OpKind::broadcast)
      .value("ALLTOALL", OpKind::alltoall)
      .value("REDUCESCATTER", OpKind::reducescatter)
      .value("BARRIER", OpKind::barrier)
      .value("JOIN", OpKind::join)
      .value("ADD_PROCESS_SET", OpKind::add_process_set)
      .value("REMOVE_PROCESS_SET", OpKind::remove_process_set)
      .value("OPEN_PROCESS_SET", OpKind::open_process_set)
      .value("CLOSE_PROCESS_SET", OpKind::close_process_set)
      .value("TRANSFER", OpKind::transfer);
  module.attr("ANY_SOURCE") = kAnySource;  // of a message

  nb::enum_<ReduceOp>(module, "ReduceOp", "How the values of all ranks become one.")
      .value("Average", ReduceOp::average)
      .value("Sum", ReduceOp::sum)
      .value("Min", ReduceOp::min)
      .value("Max", ReduceOp::max)
      .value("Product", ReduceOp::product)
      .value("Adasum", ReduceOp::adasum);

  module.def("option_table", &option_table);
  module.def("set_log_level", &set_log_level);
  module.def("check_option", [](const std::string& name, const std::string& text) { Options().set(name, text); });
  module.def("simd_in_use", &simd_in_use);
  module.def("hmac_sha256", [](const nb::bytes& key, const nb::bytes& message) {
    const Sha256 digest = hmac_sha256(as_string(key), as_string(message));
    return nb::bytes(digest.data(), digest.size());
  });
  module.def(
      "is_hmac_sha256",
      [](const nb::bytes& proof, const nb::bytes& key, const nb::bytes& message) {
        Sha256 digest;
        if (proof.size() != digest.size()) return false;
        std::memcpy(digest.data(), proof.c_str(), digest.size());
        return are_equal(digest, hmac_sha256(as_string(key), as_string(message)));
      },
      "Takes the same time wherever the proof differs.");
  module.def("require_sealing", &Sealing::require, "Raises RingtrainError where connections cannot be encrypted.");
  module.def("interface_addresses", &interface_addresses, "(interface, address) of this host's that are up.");
}

}  // namespace ringtrain
