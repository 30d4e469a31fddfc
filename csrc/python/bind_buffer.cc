// Memory of arrays: what Python tells of it, and what objects with the buffer protocol tell.
#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "base/dtype.h"
#include "base/error.h"
#include "base/tensor.h"
#include "kernels/copy.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

// Fields of a view.
constexpr Py_ssize_t kInHostMemory = 3, kOnGpu = 5;

// By the letters of Python's struct module. bfloat16 has none.
std::optional<DType> dtype_of(const Py_buffer& buffer) {
  const std::string_view format = buffer.format;
  if (format.size() != 1) return std::nullopt;
  const bool is_wide = buffer.itemsize == 8;
  switch (format.front()) {
    case '?':
      return DType::boolean;
    case 'b':
      return DType::int8;
    case 'B':
      return DType::uint8;
    case 'h':
      return DType::int16;
    case 'H':
      return DType::uint16;
    case 'i':
      return DType::int32;
    case 'I':
      return DType::uint32;
    case 'l':
      return is_wide ? DType::int64 : DType::int32;
    case 'L':
      return is_wide ? DType::uint64 : DType::uint32;
    case 'q':
      return DType::int64;
    case 'Q':
      return DType::uint64;
    case 'e':
      return DType::float16;
    case 'f':
      return DType::float32;
    case 'd':
      return DType::float64;
    default:
      return std::nullopt;
  }
}

// (address, dtype, shape), or None unless it is dense, writable and of a dtype that the core has. A quarter of the cost
// of reading the same from Python.
nb::object writable_view(nb::handle object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    return nb::none();
  }
  nb::object view = nb::none();
  if (const std::optional<DType> dtype = dtype_of(buffer)) {
    nb::object shape = nb::steal(PyTuple_New(buffer.ndim));
    for (int i = 0; i < buffer.ndim; ++i) NB_TUPLE_SET_ITEM(shape.ptr(), i, PyLong_FromSsize_t(buffer.shape[i]));
    view = nb::make_tuple(reinterpret_cast<uintptr_t>(buffer.buf), static_cast<int>(*dtype), shape);
  }
  PyBuffer_Release(&buffer);
  return view;
}

// Where the memory begins.
uintptr_t address(nb::handle object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_STRIDES) != 0) throw nb::python_error();
  const auto result = reinterpret_cast<uintptr_t>(buffer.buf);
  PyBuffer_Release(&buffer);
  return result;
}

// Of every gradient in every step: without the references that nanobind would count.
uint64_t number(const nb::tuple& tuple, Py_ssize_t field) {
  const uint64_t value = PyLong_AsUnsignedLongLong(NB_TUPLE_GET_ITEM(tuple.ptr(), field));
  if (value == static_cast<uint64_t>(-1) && PyErr_Occurred()) throw nb::python_error();
  return value;
}

// A tuple, or a torch.Size, which is one.
Shape to_shape(nb::handle tuple) {
  if (!PyTuple_Check(tuple.ptr())) throw invalid("the shape of a view is a tuple");
  Shape shape(static_cast<size_t>(NB_TUPLE_GET_SIZE(tuple.ptr())));
  for (size_t i = 0; i < shape.size(); ++i) {
    shape[i] = PyLong_AsLongLong(NB_TUPLE_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i)));
    if (shape[i] == -1 && PyErr_Occurred()) throw nb::python_error();
  }
  return shape;
}

bool is_shape(nb::handle tuple, const Shape& shape) {
  if (!PyTuple_Check(tuple.ptr()) || NB_TUPLE_GET_SIZE(tuple.ptr()) != static_cast<Py_ssize_t>(shape.size()))
    return false;
  for (size_t i = 0; i < shape.size(); ++i)
    if (PyLong_AsLongLong(NB_TUPLE_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i))) != shape[i]) return false;
  return true;
}

std::optional<TensorPlace> place_of_same_view(const nb::tuple& view, const TensorSpec& spec, int device) {
  const bool is_on_gpu = device != TensorView::kHost;
  if (NB_TUPLE_GET_SIZE(view.ptr()) != (is_on_gpu ? kOnGpu : kInHostMemory) ||
      number(view, 1) != static_cast<uint64_t>(spec.dtype) || !is_shape(NB_TUPLE_GET_ITEM(view.ptr(), 2), spec.shape) ||
      (is_on_gpu && number(view, 3) != static_cast<uint64_t>(device)))
    return std::nullopt;
  return TensorPlace{reinterpret_cast<void*>(number(view, 0)),
                     is_on_gpu ? reinterpret_cast<CudaStream>(number(view, 4)) : nullptr};
}

}  // namespace

std::optional<TensorPlace> place_of_same(nb::handle object, const TensorSpec& spec, int device) {
  if (PyTuple_CheckExact(object.ptr())) return place_of_same_view(nb::borrow<nb::tuple>(object), spec, device);
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const bool is_same = device == TensorView::kHost && dtype_of(buffer) == spec.dtype &&
                       static_cast<size_t>(buffer.ndim) == spec.shape.size() &&
                       std::equal(spec.shape.begin(), spec.shape.end(), buffer.shape);
  void* const address = buffer.buf;
  PyBuffer_Release(&buffer);
  return is_same ? std::optional(TensorPlace{address}) : std::nullopt;
}

TensorView to_view(const nb::tuple& tuple) {
  const Py_ssize_t fields = NB_TUPLE_GET_SIZE(tuple.ptr());
  if (fields != kInHostMemory && fields != kOnGpu) throw invalid("a view has 3 or 5 fields");
  TensorView view;
  view.address = reinterpret_cast<void*>(number(tuple, 0));
  view.spec.dtype = static_cast<DType>(number(tuple, 1));
  view.spec.shape = to_shape(NB_TUPLE_GET_ITEM(tuple.ptr(), 2));
  if (fields != kOnGpu) return view;
  view.device = static_cast<int>(number(tuple, 3));
  view.stream = reinterpret_cast<CudaStream>(number(tuple, 4));
  return view;
}

nb::object array_of_bytes(std::shared_ptr<char> memory, size_t bytes) {
  using Array = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>;
  char* data = memory.get();
  auto* owner = new std::shared_ptr<char>(std::move(memory));
  nb::capsule capsule(owner, [](void* pointer) noexcept { delete static_cast<std::shared_ptr<char>*>(pointer); });
  return nb::cast(Array(data, {bytes}, capsule));
}

void bind_buffer(nb::module_& module) {
  module.def(
      "digest",
      [](const std::tuple<uintptr_t, int, Shape>& view) {
        const auto& [address, dtype, shape] = view;
        const size_t bytes = TensorSpec{static_cast<DType>(dtype), shape}.bytes();
        ReleasedGil release;
        return static_cast<int64_t>(digest(reinterpret_cast<const void*>(address), bytes));
      },
      nb::arg("view"), "64 bits that tell whether two arrays hold the same.");
  module.def("address", &address, "The address of the memory of an object with the buffer protocol.");
  module.def("writable_view", &writable_view,
             "(address, dtype, shape) of an object with the buffer protocol, or None unless it is dense, writable and "
             "of a dtype that has a letter there.");
}

}  // namespace ringtrain
