// Allreduces and broadcasts of one array in place: without lists and keywords, and repeated ones without an object of
// Python's for each.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/tensor.h"
#include "python/bind.h"
#include "runtime/submission_builder.h"

namespace ringtrain {
namespace {

namespace nb = nanobind;

class Exchange {
 public:
  // `__dlpack_c_exchange_api__` of a class. Nothing where its version is another one.
  static std::optional<Exchange> of(nb::handle capsule);

  // Where a tensor of torch, of exactly that class, is if it is on this device, is dense and its elements are these: in
  // this shape, or in any.
  std::optional<TensorPlace> place_of_same(nb::handle tensor, const TensorSpec& spec, int device, bool is_flat) const;

  // torch's current one on a GPU.
  CudaStream current_stream(int device) const;

 private:
  // As DLPack writes it down, from its version 1.3 on. nanobind has the rest.
  struct Api {
    uint32_t major, minor;
    const Api* older;
    void (*unused[3])();
    int (*look)(void* object, nb::dlpack::dltensor* seen);  // borrowed; may be null
    int (*find_stream)(int device_type, int32_t device, void** stream);
  };

  explicit Exchange(const Api& api) : api_(&api) {}

  const Api* api_;  // lives as long as the process
};

constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr uint32_t kMajor = 1;

nb::dlpack::dtype_code code_of(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  if (dtype == DType::boolean) return Code::Bool;
  if (dtype == DType::bfloat16) return Code::Bfloat;
  if (is_float(dtype)) return Code::Float;
  return is_unsigned(dtype) ? Code::UInt : Code::Int;
}

bool is_dtype(const nb::dlpack::dtype& seen, DType dtype) {
  return seen.code == static_cast<uint8_t>(code_of(dtype)) && seen.bits == 8 * size_of(dtype) && seen.lanes == 1;
}

bool is_dense(const nb::dlpack::dltensor& seen) {
  if (seen.strides == nullptr) return true;
  int64_t stride = 1;
  for (int i = seen.ndim; i-- > 0; stride *= std::max<int64_t>(seen.shape[i], 1))
    if (seen.shape[i] != 1 && seen.strides[i] != stride)
      return std::find(seen.shape, seen.shape + seen.ndim, 0) != seen.shape + seen.ndim;  // without elements
  return true;
}

// A bit of torch's tensors that DLPack does not tell: their values are the negative ones of what is in memory.
bool is_negative(nb::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const nb::object answer = nb::steal(PyObject_CallMethodObjArgs(tensor.ptr(), name, nullptr));
  if (!answer.is_valid()) PyErr_Clear();
  return answer.ptr() != Py_False;
}

bool is_on(const nb::dlpack::dltensor& seen, int device) {
  if (device == TensorView::kHost) return seen.device.device_type == nb::device::cpu::value;
  return seen.device.device_type == nb::device::cuda::value && seen.device.device_id == device;
}

std::optional<Exchange> Exchange::of(nb::handle capsule) {
  const auto* api = static_cast<const Api*>(PyCapsule_GetPointer(capsule.ptr(), kCapsule));
  if (api == nullptr) throw nb::python_error();
  while (api != nullptr && api->major != kMajor) api = api->older;
  return api != nullptr && api->look != nullptr ? std::optional(Exchange(*api)) : std::nullopt;
}

bool has_shape(const nb::dlpack::dltensor& seen, const TensorSpec& spec) {
  return static_cast<size_t>(seen.ndim) == spec.shape.size() &&
         std::equal(spec.shape.begin(), spec.shape.end(), seen.shape);
}

bool has_count(const nb::dlpack::dltensor& seen, const TensorSpec& spec) {
  return std::accumulate(seen.shape, seen.shape + seen.ndim, int64_t{1}, std::multiplies<>()) == spec.count();
}

CudaStream Exchange::current_stream(int device) const {
  void* stream = nullptr;
  if (api_->find_stream(nb::device::cuda::value, device, &stream) != 0) throw nb::python_error();
  return static_cast<CudaStream>(stream);
}

std::optional<TensorPlace> Exchange::place_of_same(nb::handle tensor, const TensorSpec& spec, int device,
                                                   bool is_flat) const {
  nb::dlpack::dltensor seen;
  if (api_->look(tensor.ptr(), &seen) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const bool is_same = is_on(seen, device) && is_dtype(seen.dtype, spec.dtype) &&
                       (is_flat ? has_count(seen, spec) : has_shape(seen, spec)) && is_dense(seen) &&
                       !is_negative(tensor);
  if (!is_same) return std::nullopt;
  TensorPlace place{static_cast<char*>(seen.data) + seen.byte_offset};
  if (device != TensorView::kHost) place.stream = current_stream(device);
  return place;
}

Request request_of(std::string name, ReduceOp op, double prescale, double postscale, int process_set, int priority,
                   const Site& site) {
  Request request{{}, priority, site.text};
  request.operation.name = std::move(name);
  request.operation.process_set = process_set;
  request.operation.op = op;
  request.operation.factors = {prescale, postscale};
  return request;
}

// The road of a gradient that comes for the first time.
SharedHandle allreduce_in_place(const nb::tuple& view, std::string name, ReduceOp op, double prescale, double postscale,
                                int process_set, int priority, bool is_awaited, const Site& site,
                                std::optional<double> weight) {
  SubmissionBuilder builder(request_of(std::move(name), op, prescale, postscale, process_set, priority, site));
  builder.add_in_place(to_view(view));
  if (weight) builder.set_weight(*weight);
  const CudaStream stream = builder.stream();
  return {builder.submit(caller_that(is_awaited)), stream};
}

// Whether this thread has submitted an array that was prepared. The first one of each takes the long road, on which
// Python counts the threads that submit.
thread_local bool is_known_to_submit = false;

// With the GIL. The last submission, with its array, stays here until it is taken, or has been waited for here.
class PreparedArray {
 public:
  // `look`: a function that makes a view of such an array, or None, for the buffer protocol. `find_stream`: for an
  // array on a GPU, a function that returns the current stream there. `exchange`: torch's capsule, with which neither
  // is needed, or None. `is_flat`: with the capsule, an array may have another shape with as many elements.
  PreparedArray(Prepared prepared, nb::type_object type, nb::object look, nb::object find_stream, nb::handle exchange,
                bool is_flat)
      : prepared_(std::move(prepared)),
        type_(std::move(type)),
        look_(std::move(look)),
        find_stream_(std::move(find_stream)),
        is_flat_(is_flat) {
    if (!exchange.is_none()) exchange_ = Exchange::of(exchange);
  }

  bool is_for(nb::handle array) const { return place_of(array).has_value(); }

  // None for an array that is not what was prepared; then nothing has happened.
  std::optional<SharedHandle> start(nb::handle array, bool is_awaited, std::string title, const Site* site) {
    const std::optional<TensorPlace> place = place_of(array);
    if (!place) return std::nullopt;
    is_known_to_submit = true;
    return submit(*place, caller_that(is_awaited), std::move(title), site);
  }

  // As start(), on a thread that has called start().
  std::optional<SharedHandle> start_again(nb::handle array) {
    if (!is_known_to_submit) return std::nullopt;
    const std::optional<TensorPlace> place = place_of(array);
    if (!place) return std::nullopt;
    return submit(*place, Engine::Caller::goes_on);
  }

  // As start(), and false while the last submission is here, or on a thread that has not called start(). The title and
  // the site are cast only where they are given: most gradients come without. Another thread may begin while the array
  // is looked at, by functions of Python.
  bool begin(nb::handle array, bool is_awaited, nb::handle title, nb::handle site) {
    if (!is_known_to_submit) return false;
    const std::optional<TensorPlace> place = place_of(array);
    if (!place || has_begun()) return false;
    begun_ = site.is_none()
                 ? submit(*place, caller_that(is_awaited))
                 : submit(*place, caller_that(is_awaited), nb::cast<std::string>(title), nb::cast<const Site*>(site));
    array_ = nb::borrow(array);
    return true;
  }

  // The array of what was begun, which then is taken, if that is done after at most so many seconds. On a GPU the
  // current stream waits for it. It must be the one that it was begun in: for others somebody has to keep the array.
  nb::object finish(double timeout_s, double give_up_s) {
    const SharedHandle begun = begun_;
    if (!begun.handle) throw invalid("nothing was begun");
    if (!wait_for(*begun.handle, timeout_s, give_up_s)) return nb::none();
    if (prepared_.is_on_gpu() && !begun.follow(current_stream())) return nb::none();
    return take().second;
  }

  void set_weight(double weight) { prepared_.set_weight(weight); }

  // Whether it would be submitted for this process set with this priority, and with a weight or without one. Takes the
  // weight.
  bool is_repeated_with(nb::handle process_set, nb::handle priority, nb::handle weight) {
    return is_number(process_set, prepared_.process_set()) && is_number(priority, prepared_.priority()) &&
           take_weight(weight);
  }

  // The arguments of the calls that submit it again: the name, ..., the process set, and the priority.
  void set_key(const nb::tuple& key, nb::object site) {
    for (nb::handle part : key) key_.push_back(nb::borrow(part));
    site_ = std::move(site);
  }

  void clear_key() { std::vector<nb::object>().swap(key_); }
  // For Python, which looks for circles.
  int visit_key(visitproc visit, void* argument) const {
    for (const nb::object& part : key_)
      if (const int result = visit(part.ptr(), argument)) return result;
    return 0;
  }

  // Whether these are the arguments of a call that submits it again: the key and the site, None for any. Takes the
  // weight.
  bool is_repeated_by(nb::handle weight, PyObject* const* arguments, size_t count) {
    const size_t parts = key_.size();
    if (parts < kFewestParts || count != parts + 1) return false;
    const nb::handle site = arguments[parts];
    if (!site.is_none() && !site_.is(site)) return false;
    for (size_t i = 0; i < parts; ++i)
      if (!key_[i].is(arguments[i]) && !is_equal(key_[i], arguments[i])) return false;
    return is_registered(arguments[parts - 2]) && take_weight(weight);
  }

  bool has_begun() const { return begun_.handle != nullptr; }

  // Returns what was begun, and its array.
  std::pair<SharedHandle, nb::object> take() {
    if (!has_begun()) throw invalid("nothing was begun");
    return {std::exchange(begun_, {}), std::exchange(array_, nb::object())};
  }

 private:
  SharedHandle submit(const TensorPlace& place, Engine::Caller caller) {
    return {prepared_.submit(place, caller), place.stream};
  }

  SharedHandle submit(const TensorPlace& place, Engine::Caller caller, std::string title, const Site* site) {
    if (!site) return submit(place, caller);
    return {prepared_.submit(place, caller, std::move(title), site->text), place.stream};
  }

  // Of every gradient in every step.
  std::optional<TensorPlace> place_of(nb::handle array) const {
    if (Py_TYPE(array.ptr()) != reinterpret_cast<PyTypeObject*>(type_.ptr())) return std::nullopt;
    const TensorSpec& spec = prepared_.spec();
    if (exchange_) return exchange_->place_of_same(array, spec, prepared_.device(), is_flat_);
    if (look_.is_none()) return place_of_same(array, spec, prepared_.device());
    const nb::object view = look_(array);
    return view.is_none() ? std::nullopt : place_of_same(view, spec, prepared_.device());
  }

  static constexpr size_t kFewestParts = 3;

  static bool is_equal(nb::handle one, nb::handle other) {
    const int answer = PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
    if (answer < 0) PyErr_Clear();
    return answer == 1;
  }

  static bool is_number(nb::handle object, int number) {
    int value;
    return nb::try_cast(object, value) && value == number;
  }

  // Whether the process set still has the number with which this was prepared.
  bool is_registered(nb::handle process_set) const {
    static PyObject* const name = PyUnicode_InternFromString("process_set_id");
    const nb::object number = nb::steal(PyObject_GetAttr(process_set.ptr(), name));
    if (!number.is_valid()) PyErr_Clear();
    return number.is_valid() && is_number(number, prepared_.process_set());
  }

  // False for what is not a plain number that is allowed.
  bool take_weight(nb::handle weight) {
    if (weight.is_none() || !prepared_.is_weighted()) return weight.is_none() && !prepared_.is_weighted();
    if (!PyFloat_Check(weight.ptr()) && !PyLong_CheckExact(weight.ptr())) return false;
    const double value = PyFloat_AsDouble(weight.ptr());
    if (PyErr_Occurred()) PyErr_Clear();
    if (!std::isfinite(value) || value < 0) return false;
    prepared_.set_weight(value);
    return true;
  }

  CudaStream current_stream() const {
    if (exchange_) return exchange_->current_stream(prepared_.device());
    return reinterpret_cast<CudaStream>(nb::cast<uintptr_t>(find_stream_()));
  }

  Prepared prepared_;
  const nb::type_object type_;
  const nb::object look_;
  const nb::object find_stream_;
  const bool is_flat_;
  std::optional<Exchange> exchange_;
  std::vector<nb::object> key_;
  nb::object site_;
  SharedHandle begun_;
  nb::object array_;
};

// A key may have an object of the user, who may keep this.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<PreparedArray>(self)->visit_key(visit, arg) : 0;
}

int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<PreparedArray>(self)->clear_key();
  return 0;
}

PyType_Slot collected[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)}, {Py_tp_clear, reinterpret_cast<void*>(&clear)}, {0, nullptr}};

// Functions of Python's own kind, since one of nanobind with so many arguments takes 0.1 us longer. Arguments: a dict
// of what was prepared, the array, the weight, the name, ..., the process set, the priority, the site or None.
//
// The dict has a Prepared by each name. Calls without a name are known by their line: there it has a list, since such a
// line may be in a function that a script calls with arrays of several shapes.

PyObject* type_of_prepared = nullptr;

PreparedArray* as_prepared(nb::handle object) {
  const int is_one = PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(type_of_prepared));
  return is_one != 0 ? nb::inst_ptr<PreparedArray>(object) : nullptr;
}

// Returns the Prepared that these arguments submit again; nothing if there is none. Comparing runs code of the user,
// and another thread may change dict and list meanwhile.
nb::object find(PyObject* const* arguments, Py_ssize_t count) {
  constexpr Py_ssize_t kArray = 1, kWeight = 2, kName = 3;
  if (count <= kName + 1) return {};
  const nb::handle name = arguments[kName], site = arguments[count - 1];
  if (!name.is_none() && !PyUnicode_CheckExact(name.ptr())) return {};
  const nb::object found = nb::borrow(PyDict_GetItemWithError(arguments[0], name.is_none() ? site.ptr() : name.ptr()));
  const auto is_repeated = [&](const nb::object& object) {
    PreparedArray* prepared = as_prepared(object);
    return prepared &&
           prepared->is_repeated_by(arguments[kWeight], arguments + kName, static_cast<size_t>(count - kName));
  };
  if (!found.is_valid()) return {};
  if (!PyList_CheckExact(found.ptr())) return is_repeated(found) ? found : nb::object();
  for (Py_ssize_t i = 0; i < PyList_Size(found.ptr()); ++i) {
    const nb::object one = nb::borrow(PyList_GetItem(found.ptr(), i));
    if (is_repeated(one) && nb::inst_ptr<PreparedArray>(one)->is_for(arguments[kArray])) return one;
  }
  return {};
}

PyObject* find_repeated(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  const nb::object found = find(arguments, count);
  return found.is_valid() ? found.inc_ref().ptr() : nb::none().release().ptr();
}

PyObject* run_repeated(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  const nb::object found = find(arguments, count);
  if (!found.is_valid()) return nb::none().release().ptr();
  constexpr double kUsual_s = 0.2, kNever_s = std::numeric_limits<double>::infinity();
  auto* prepared = nb::inst_ptr<PreparedArray>(found);
  const nb::handle array = arguments[1];
  bool has_begun = false;
  try {
    try {
      has_begun = prepared->begin(array, true, nb::none(), nb::none());
      nb::object finished = has_begun ? prepared->finish(kUsual_s, kNever_s) : nb::none();
      if (!finished.is_none()) return finished.release().ptr();
    } catch (const Error&) {  // comes again, where nanobind makes an exception of it
      if (!has_begun) has_begun = nb::cast<bool>(found.attr("begin")(array, true, "", nb::none()));
    }
  } catch (nb::python_error& error) {
    found.attr("end")(error.value());
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return (has_begun ? found : nb::none()).inc_ref().ptr();
}

PyMethodDef functions[] = {
    {"find_repeated", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&find_repeated)), METH_FASTCALL,
     "(known, array, weight, *key, site): the Prepared that a call with these arguments submits again, which gets the "
     "weight; or None. known: by name, and lists by the site of calls without a name. key: the name, ..., the process "
     "set, the priority. site: None if it need not be the same."},
    {"run_repeated", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&run_repeated)), METH_FASTCALL,
     "(known, array, weight, *key, site): begins for a caller that waits what find_repeated() returns, and returns the "
     "array if it is done after 0.2 s. Returns the Prepared if it is still to be finished, or has failed; None if "
     "nothing has happened, as in begin()."},
};

void prepare(PreparedArray* place, const nb::tuple& view, std::string name, ReduceOp op, double prescale,
             double postscale, int process_set, int priority, const Site& site, nb::type_object type, nb::object look,
             nb::object find_stream, nb::handle exchange, bool is_flat, bool waits_for_name, bool is_weighted,
             OpKind kind, int root) {
  Request request = request_of(std::move(name), op, prescale, postscale, process_set, priority, site);
  request.operation.is_weighted = is_weighted;
  request.operation.kind = kind;
  request.operation.root = root;
  new (place) PreparedArray(Prepared(std::move(request), to_view(view), waits_for_name), std::move(type),
                            std::move(look), std::move(find_stream), exchange, is_flat);
}

}  // namespace

// How torch tells C++ of a tensor without Python: DLPack's exchange API, a table of functions in a capsule.

void bind_in_place(nb::module_& module) {
  for (PyMethodDef& function : functions)
    module.attr(function.ml_name) = nb::steal(PyCFunction_New(&function, nullptr));
  module.def("allreduce_in_place", &allreduce_in_place, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none() = nb::none(),
             "As submit, for what gradients need, positional only.");
  nb::class_<PreparedArray> prepared(
      module, "Prepared", nb::type_slots(collected),
      "An operation in place on one array that comes again and again. Its view is the same each time, but for the "
      "address and the stream. One thread at a time. Nothing happens with an array that is of another type, on another "
      "device, not dense, not writable, or not of the dtype and shape that were prepared.");
  type_of_prepared = prepared.ptr();
  prepared
      .def("__init__", &prepare, nb::arg("view"), nb::arg("name"), nb::arg("op"), nb::arg("prescale"),
           nb::arg("postscale"), nb::arg("process_set"), nb::arg("priority"), nb::arg("site"), nb::arg("type"),
           nb::arg("look").none(), nb::arg("find_stream").none(), nb::arg("exchange").none(),
           nb::arg("is_flat") = false, nb::arg("waits_for_name") = false, nb::arg("is_weighted") = false,
           nb::arg("kind") = OpKind::allreduce, nb::arg("root") = 0)
      .def("start", &PreparedArray::start, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
           "(array, is_awaited, title, site): as allreduce_in_place; None if nothing has happened. title and site: as "
           "for submit(), of this call; or \"\" and None.")
      .def("start_again", &PreparedArray::start_again, nb::arg(),
           "(array): as start(). Nothing happens on a thread that has not called start().")
      .def("begin", &PreparedArray::begin, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
           "(array, is_awaited, title, site): submits it as start() and keeps Handle and array until they are taken. "
           "Whether it has: not while the last ones are here, and not on a thread that has not called start.")
      .def("finish", &PreparedArray::finish,
           "(timeout_s, give_up_s): takes the array if it is done after at most so many seconds, else None. On a GPU "
           "the current stream waits; if it is not the one of begin(), nothing is taken, either. An operation that "
           "failed is still to be taken. give_up_s: as for wait().")
      .def("set_key", &PreparedArray::set_key, nb::arg(), nb::arg().none(),
           "(key, site): of the calls that submit it again; see find_repeated().")
      .def("set_weight", &PreparedArray::set_weight, "Of the submissions from now on, if it was prepared as weighted.")
      .def(
          "is_repeated_with", &PreparedArray::is_repeated_with, nb::arg().none(), nb::arg(), nb::arg().none(),
          "(process_set, priority, weight): whether it was prepared for these, and with a weight or without one. Takes "
          "the weight.")
      .def("has_begun", &PreparedArray::has_begun, "Whether there is something to take.")
      .def("take", &PreparedArray::take, "The Handle of what was begun, and its array.");
}

}  // namespace ringtrain
