// The completion of one submission, and the memory of its results.
#include <nanobind/ndarray.h>

#include "python/bind.h"
#include "runtime/handle.h"

namespace ringtrain {
namespace {

using RawBytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>;

// The bytes as a NumPy array that keeps the memory alive, with dtype and shape for who makes a typed array of it.
nb::list tensors_of(const Handle& handle) {
  nb::list tensors;
  for (const OwnedTensor& tensor : handle.result().tensors) {
    auto* owner = new std::shared_ptr<char>(tensor.memory);
    nb::capsule capsule(owner, [](void* pointer) noexcept { delete static_cast<std::shared_ptr<char>*>(pointer); });
    const size_t bytes = tensor.spec.bytes();
    tensors.append(nb::make_tuple(RawBytes(tensor.memory.get(), {bytes}, capsule), static_cast<int>(tensor.spec.dtype),
                                  tensor.spec.shape));
  }
  return tensors;
}

}  // namespace

void bind_handle(nb::module_& module) {
  nb::class_<Handle>(module, "Handle", "Completion of one submitted operation.")
      .def("is_done", &Handle::is_done)
      .def("tensors", &tensors_of, "Results that the operation allocated: (bytes, dtype, shape) each.")
      .def("received_splits", [](const Handle& handle) { return handle.result().received_splits; })
      .def("number", [](const Handle& handle) { return handle.result().number; });
}

}  // namespace ringtrain
