// Allreduces and broadcasts of one array in place: without lists and keywords, and repeated ones without an object of
// Python's for each.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "base/dtype.h"
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

  // Where a tensor of torch, of exactly that class, begins if it is in host memory, is dense and its elements are
  // these: in this shape, or in any.
  std::optional<void*> address_of_same(nb::handle tensor, const TensorSpec& spec, bool is_flat) const;

 private:
  // As DLPack writes it down, from its version 1.3 on. nanobind has the rest.
  struct Api {
    uint32_t major, minor;
    const Api* older;
    void (*unused[3])();
    int (*look)(void* object, nb::dlpack::dltensor* seen);  // borrowed; may be null
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
    if (seen.shape[i] != 1 && seen.strides[i] != stride) return false;
  return true;
}

// A bit of torch's tensors that DLPack does not tell: their values are the negative ones of what is in memory.
bool is_negative(nb::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const nb::object answer = nb::steal(PyObject_CallMethodObjArgs(tensor.ptr(), name, nullptr));
  if (!answer.is_valid()) PyErr_Clear();
  return answer.ptr() != Py_False;
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

std::optional<void*> Exchange::address_of_same(nb::handle tensor, const TensorSpec& spec, bool is_flat) const {
  nb::dlpack::dltensor seen;
  if (api_->look(tensor.ptr(), &seen) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const bool is_same = seen.device.device_type == nb::device::cpu::value && is_dtype(seen.dtype, spec.dtype) &&
                       (is_flat ? has_count(seen, spec) : has_shape(seen, spec)) && is_dense(seen) &&
                       !is_negative(tensor);
  return is_same ? std::optional<void*>(static_cast<char*>(seen.data) + seen.byte_offset) : std::nullopt;
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
  return {builder.submit(caller_that(is_awaited))};
}

// Whether this thread has submitted an array that was prepared. The first one of each takes the long road, on which
// Python counts the threads that submit.
thread_local bool is_known_to_submit = false;

// With the GIL. The last submission, with its array, stays here until it is taken, or has been waited for here.
class PreparedArray {
 public:
  // `look`: a function that makes a view of such an array, or None, for the buffer protocol. `exchange`: torch's
  // capsule, with which that is not needed, or None. `is_flat`: with the capsule, an array may have another shape with
  // as many elements.
  PreparedArray(Prepared prepared, nb::type_object type, nb::object look, nb::handle exchange, bool is_flat)
      : prepared_(std::move(prepared)), type_(std::move(type)), look_(std::move(look)), is_flat_(is_flat) {
    if (!exchange.is_none()) exchange_ = Exchange::of(exchange);
  }

  // None for an array that is not what was prepared; then nothing has happened.
  std::optional<SharedHandle> start(nb::handle array, std::string title, const Site* site) {
    const std::optional<void*> address = address_of(array);
    if (!address) return std::nullopt;
    is_known_to_submit = true;
    return SharedHandle{submit(*address, Engine::Caller::goes_on, std::move(title), site)};
  }

  // As start(), on a thread that has called start().
  std::optional<SharedHandle> start_again(nb::handle array) {
    if (!is_known_to_submit) return std::nullopt;
    const std::optional<void*> address = address_of(array);
    if (!address) return std::nullopt;
    return SharedHandle{prepared_.submit(*address, Engine::Caller::goes_on)};
  }

  // As start(), and false while the last submission is here, or on a thread that has not called start(). The title and
  // the site are cast only where they are given: most gradients come without.
  bool begin(nb::handle array, bool is_awaited, nb::handle title, nb::handle site) {
    if (begun_ || !is_known_to_submit) return false;
    const std::optional<void*> address = address_of(array);
    if (!address) return false;
    begun_ = site.is_none()
                 ? prepared_.submit(*address, caller_that(is_awaited))
                 : submit(*address, caller_that(is_awaited), nb::cast<std::string>(title), nb::cast<const Site*>(site));
    array_ = nb::borrow(array);
    return true;
  }

  // The array of what was begun, which then is taken, if that is done after at most so many seconds.
  nb::object finish(double timeout_s, double give_up_s) {
    const std::shared_ptr<Handle> handle = begun_;
    if (!handle) throw invalid("nothing was begun");
    return wait_for(*handle, timeout_s, give_up_s) ? take().second : nb::none();
  }

  void set_weight(double weight) { prepared_.set_weight(weight); }

  bool has_begun() const { return begun_ != nullptr; }

  // Returns what was begun, and its array.
  std::pair<SharedHandle, nb::object> take() {
    if (!begun_) throw invalid("nothing was begun");
    return {SharedHandle{std::exchange(begun_, nullptr)}, std::exchange(array_, nb::object())};
  }

 private:
  std::shared_ptr<Handle> submit(void* address, Engine::Caller caller, std::string title, const Site* site) {
    return site ? prepared_.submit(address, caller, std::move(title), site->text) : prepared_.submit(address, caller);
  }

  // Of every gradient in every step.
  std::optional<void*> address_of(nb::handle array) const {
    if (Py_TYPE(array.ptr()) != reinterpret_cast<PyTypeObject*>(type_.ptr())) return std::nullopt;
    if (exchange_) return exchange_->address_of_same(array, prepared_.spec(), is_flat_);
    if (look_.is_none()) return address_of_same(array, prepared_.spec());
    const nb::object view = look_(array);
    return view.is_none() ? std::nullopt : address_of_same(view, prepared_.spec());
  }

  Prepared prepared_;
  const nb::type_object type_;
  const nb::object look_;
  const bool is_flat_;
  std::optional<Exchange> exchange_;
  std::shared_ptr<Handle> begun_;
  nb::object array_;
};

void prepare(PreparedArray* place, const nb::tuple& view, std::string name, ReduceOp op, double prescale,
             double postscale, int process_set, int priority, const Site& site, nb::type_object type, nb::object look,
             nb::handle exchange, bool is_flat, bool waits_for_name, bool is_weighted, OpKind kind, int root) {
  TensorView tensor = to_view(view);
  if (tensor.device != TensorView::kHost) throw invalid("only what is in host memory can be prepared");
  Request request = request_of(std::move(name), op, prescale, postscale, process_set, priority, site);
  request.operation.is_weighted = is_weighted;
  request.operation.kind = kind;
  request.operation.root = root;
  new (place) PreparedArray(Prepared(std::move(request), std::move(tensor.spec), waits_for_name), std::move(type),
                            std::move(look), exchange, is_flat);
}

}  // namespace

// How torch tells C++ of a tensor without Python: DLPack's exchange API, a table of functions in a capsule.

void bind_in_place(nb::module_& module) {
  module.def("allreduce_in_place", &allreduce_in_place, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none() = nb::none(),
             "As submit, for what gradients need, positional only.");
  nb::class_<PreparedArray>(
      module, "Prepared",
      "An operation in place on one array in host memory that comes again and again, as its view is but for the "
      "address. One thread at a time. Nothing happens with an array that is of another type, not dense, not writable, "
      "or not of the dtype and shape that were prepared.")
      .def("__init__", &prepare, nb::arg("view"), nb::arg("name"), nb::arg("op"), nb::arg("prescale"),
           nb::arg("postscale"), nb::arg("process_set"), nb::arg("priority"), nb::arg("site"), nb::arg("type"),
           nb::arg("look").none(), nb::arg("exchange").none(), nb::arg("is_flat") = false,
           nb::arg("waits_for_name") = false, nb::arg("is_weighted") = false, nb::arg("kind") = OpKind::allreduce,
           nb::arg("root") = 0)
      .def(
          "start", &PreparedArray::start, nb::arg(), nb::arg(), nb::arg().none(),
          "(array, title, site): as allreduce_in_place; None if nothing has happened. title and site: as for submit(), "
          "of this call; or \"\" and None.")
      .def("start_again", &PreparedArray::start_again, nb::arg(),
           "(array): as start(). Nothing happens on a thread that has not called start().")
      .def("begin", &PreparedArray::begin, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
           "(array, is_awaited, title, site): submits it as start() and keeps Handle and array until they are taken. "
           "Whether it has: not while the last ones are here, and not on a thread that has not called start.")
      .def("finish", &PreparedArray::finish,
           "(timeout_s, give_up_s): takes the array if it is done after at most so many seconds, else None. An "
           "operation that failed is still to be taken. give_up_s: as for wait().")
      .def("set_weight", &PreparedArray::set_weight, "Of the submissions from now on, if it was prepared as weighted.")
      .def("has_begun", &PreparedArray::has_begun, "Whether there is something to take.")
      .def("take", &PreparedArray::take, "The Handle of what was begun, and its array.");
}

}  // namespace ringtrain
