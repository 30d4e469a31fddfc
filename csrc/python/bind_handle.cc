// The completion of one submission, and the memory of its results.
#include "python/bind.h"

namespace ringtrain {
namespace {

// A result on a GPU, in memory that the core uses again when this is gone.
struct GpuMemory {
  GpuBlockPtr block;
  size_t bytes;
  GpuEventPtr done;

  // The copy is put into the stream; who comes after it there has the values.
  void copy_to(uintptr_t address, uintptr_t stream) const {
    auto* user = reinterpret_cast<CudaStream>(stream);
    done->let_wait(user);
    block->is_used_until(done->gpu().copy_for_user(reinterpret_cast<void*>(address), block->data(), bytes, user));
  }
};

nb::object memory_of(const OwnedTensor& tensor, const GpuEventPtr& done) {
  const size_t bytes = tensor.spec.bytes();
  if (tensor.block) return nb::cast(GpuMemory{tensor.block, bytes, done});
  return array_of_bytes(tensor.memory, bytes);
}

// In host memory the bytes are a NumPy array that keeps the memory alive. With dtype and shape, of which
// the caller makes a typed array.
nb::list tensors_of(const SharedHandle& shared) {
  nb::list tensors;
  const Result& result = shared.handle->result();
  for (const OwnedTensor& tensor : result.tensors)
    tensors.append(
        nb::make_tuple(memory_of(tensor, result.done), static_cast<int>(tensor.spec.dtype), tensor.spec.shape));
  return tensors;
}

void on_done(const SharedHandle& shared, uintptr_t function, uintptr_t argument) {
  shared.handle->on_done(
      [call = reinterpret_cast<void (*)(void*)>(function), argument] { call(reinterpret_cast<void*>(argument)); });
}

// The stream waits for the result, the host does not.
void follow(const SharedHandle& shared, uintptr_t stream) {
  const Result& result = shared.handle->result();
  if (result.done) result.done->let_wait(reinterpret_cast<CudaStream>(stream));
}

}  // namespace

void bind_handle(nb::module_& module) {
  nb::class_<GpuMemory>(module, "GpuMemory", "A result on a GPU.")
      .def_prop_ro("device", [](const GpuMemory& memory) { return memory.done->gpu().ordinal(); })
      .def("copy_to", &GpuMemory::copy_to, nb::arg("address"), nb::arg("stream"),
           "Put a copy of all its bytes to an address on the GPU into a stream, after the result is there.");
  nb::class_<SharedHandle>(module, "Handle", "Completion of one submitted operation.")
      .def("is_done", [](const SharedHandle& shared) { return shared.handle->is_done(); })
      .def(
          "is_over", [](const SharedHandle& shared) { return shared.handle->is_over(); },
          "Whether it is done, and the GPU has done it, too.")
      .def(
          "is_memory_free", [](const SharedHandle& shared) { return shared.handle->is_memory_free(); },
          "Whether nobody reads or writes its arrays any more, be it done or failed.")
      .def("on_done", &on_done, nb::arg("function"), nb::arg("argument"), nb::call_guard<ReleasedGil>(),
           "Calls a C function, void (*)(void*), by its address when it is done: once, and at once if it is already. "
           "Not while the GIL is held. It may submit, but not wait.")
      .def("follow", &follow, nb::arg("stream"), "Makes a stream of the GPU wait for the result.")
      .def("tensors", &tensors_of, "Results that the operation allocated: (bytes, dtype, shape) each.")
      .def("received_splits", [](const SharedHandle& shared) { return shared.handle->result().received_splits; })
      .def("number", [](const SharedHandle& shared) { return shared.handle->result().number; });
}

}  // namespace ringtrain
