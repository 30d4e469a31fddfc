// Allreduces of one array in place, as gradients need them: without lists and keywords, and once they come again
// without an object of Python's for each.
#include <utility>

#include "python/bind.h"
#include "python/exchange.h"
#include "python/site.h"
#include "runtime/submission_builder.h"

namespace ringtrain {
namespace {

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
                                int process_set, int priority, bool is_awaited, const Site& site) {
  SubmissionBuilder builder(request_of(std::move(name), op, prescale, postscale, process_set, priority, site));
  builder.add_in_place(to_view(view));
  return {builder.submit(caller_that(is_awaited))};
}

// Whether this thread has submitted an array that was prepared. The first one of each takes the long road, on which
// Python counts the threads that submit.
thread_local bool is_known_to_submit = false;

// With the GIL. The last submission, with its array, stays here until it is taken, or has been waited for here.
class PreparedArray {
 public:
  // `look`: a function that makes a view of such an array, or None, for the buffer protocol. `exchange`: torch's
  // capsule, with which that is not needed, or None.
  PreparedArray(Prepared prepared, nb::type_object type, nb::object look, nb::handle exchange)
      : prepared_(std::move(prepared)), type_(std::move(type)), look_(std::move(look)) {
    if (!exchange.is_none()) exchange_ = Exchange::of(exchange);
  }

  // None for an array that is not what was prepared; then nothing has happened.
  std::optional<SharedHandle> start(nb::handle array) {
    const std::optional<void*> address = address_of(array);
    if (!address) return std::nullopt;
    is_known_to_submit = true;
    return SharedHandle{prepared_.submit(*address, Engine::Caller::goes_on)};
  }

  // As start(), and false while the last submission is here, or on a thread that has not called start().
  bool begin(nb::handle array, bool is_awaited) {
    if (begun_ || !is_known_to_submit) return false;
    const std::optional<void*> address = address_of(array);
    if (!address) return false;
    begun_ = prepared_.submit(*address, caller_that(is_awaited));
    array_ = nb::borrow(array);
    return true;
  }

  // The array of what was begun, which then is taken, if that is done after at most so many seconds.
  nb::object finish(double timeout_s) {
    const std::shared_ptr<Handle> handle = begun_;
    if (!handle) throw invalid("nothing was begun");
    return wait_for(*handle, timeout_s) ? take().second : nb::none();
  }

  bool has_begun() const { return begun_ != nullptr; }

  // What was begun, and its array.
  std::pair<SharedHandle, nb::object> take() {
    if (!begun_) throw invalid("nothing was begun");
    return {SharedHandle{std::exchange(begun_, nullptr)}, std::exchange(array_, nb::object())};
  }

 private:
  // Of every gradient in every step.
  std::optional<void*> address_of(nb::handle array) const {
    if (Py_TYPE(array.ptr()) != reinterpret_cast<PyTypeObject*>(type_.ptr())) return std::nullopt;
    if (exchange_) return exchange_->address_of_same(array, prepared_.spec());
    if (look_.is_none()) return address_of_same(array, prepared_.spec());
    const nb::object view = look_(array);
    return view.is_none() ? std::nullopt : address_of_same(view, prepared_.spec());
  }

  Prepared prepared_;
  const nb::type_object type_;
  const nb::object look_;
  std::optional<Exchange> exchange_;
  std::shared_ptr<Handle> begun_;
  nb::object array_;
};

void prepare(PreparedArray* place, const nb::tuple& view, std::string name, ReduceOp op, double prescale,
             double postscale, int process_set, int priority, const Site& site, nb::type_object type, nb::object look,
             nb::handle exchange) {
  TensorView tensor = to_view(view);
  if (tensor.device != TensorView::kHost) throw invalid("only what lies in host memory can be prepared");
  new (place) PreparedArray(Prepared(request_of(std::move(name), op, prescale, postscale, process_set, priority, site),
                                     std::move(tensor.spec)),
                            std::move(type), std::move(look), exchange);
}

}  // namespace

void bind_in_place(nb::module_& module) {
  module.def("allreduce_in_place", &allreduce_in_place, "As submit, for what gradients need, positional only.");
  nb::class_<PreparedArray>(
      module, "Prepared",
      "The allreduce in place of one array in host memory that comes again and again, as its view is but for the "
      "address. One thread at a time. Nothing happens with an array that is of another type, not dense, not writable, "
      "or not of the dtype and shape that were prepared.")
      .def("__init__", &prepare, nb::arg("view"), nb::arg("name"), nb::arg("op"), nb::arg("prescale"),
           nb::arg("postscale"), nb::arg("process_set"), nb::arg("priority"), nb::arg("site"), nb::arg("type"),
           nb::arg("look").none(), nb::arg("exchange").none())
      .def("start", &PreparedArray::start, "(array): as allreduce_in_place; None if nothing has happened.")
      .def("begin", &PreparedArray::begin,
           "(array, is_awaited): submits it and keeps Handle and array until they are taken. Whether it has: not while "
           "the last ones are here, and not on a thread that has not called start.")
      .def("finish", &PreparedArray::finish,
           "(timeout_s): takes the array if it is done after at most so many seconds, else None. What fails is still "
           "to be taken.")
      .def("has_begun", &PreparedArray::has_begun, "Whether there is something to take.")
      .def("take", &PreparedArray::take, "The Handle of what was begun, and its array.");
}

}  // namespace ringtrain
