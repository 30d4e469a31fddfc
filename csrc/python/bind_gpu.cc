// The GPUs of this process, and memory on them.
#include "collectives/gpu/choose_gpu.h"
#include "gpu/cuda.h"
#include "gpu/nccl.h"
#include "python/bind.h"
#include "runtime/engine.h"

namespace ringtrain {
namespace {

// None where there is no driver, or none that can be used.
int gpu_count() {
  try {
    return CudaDriver::get().devices();
  } catch (const Error&) {
    return 0;
  }
}

// Bytes on a GPU that other libraries can make arrays of.
struct GpuBytes {
  std::shared_ptr<char> memory;
  size_t bytes;

  nb::dict interface() const {
    nb::dict interface;
    interface["shape"] = nb::make_tuple(bytes);
    interface["typestr"] = "|u1";
    interface["data"] = nb::make_tuple(reinterpret_cast<uintptr_t>(memory.get()), false);
    interface["version"] = 3;
    return interface;
  }
};

nb::object gpu_bytes(size_t bytes, int device) {
  const std::shared_ptr<Engine> engine = require_engine();
  std::shared_ptr<char> memory;
  {
    ReleasedGil release;
    memory = engine->allocate_on_gpu(device, bytes);
  }
  return memory ? nb::cast(GpuBytes{std::move(memory), bytes}) : nb::none();
}

// A point in a stream of the user's.
struct GpuPoint {
  GpuEventPtr event;

  void follow(uintptr_t stream) const { event->let_wait(reinterpret_cast<CudaStream>(stream)); }
  bool is_over() const { return event->is_over(); }
};

GpuPoint gpu_point(int device, uintptr_t stream) {
  return {require_engine()->gpu(device)->record_of_user(reinterpret_cast<CudaStream>(stream))};
}

std::pair<int, std::string> nccl_version(const std::vector<NcclCandidate>& candidates) {
  const NcclLibrary& library = NcclLibrary::open(candidates);
  return {library.version(), library.path()};
}

}  // namespace

void bind_gpu(nb::module_& module) {
  nb::class_<GpuBytes>(module, "GpuBytes", "Memory on a GPU in which NCCL works without copying.")
      .def_prop_ro("__cuda_array_interface__", &GpuBytes::interface);
  module.def("gpu_bytes", &gpu_bytes, nb::arg("bytes"), nb::arg("device"),
             "New GpuBytes on this rank's GPU, or None where NCCL has no such memory.");
  nb::class_<GpuPoint>(module, "GpuPoint", "A point in a stream of this rank's GPU.")
      .def("follow", &GpuPoint::follow, nb::arg("stream"), "Makes another stream wait for it.")
      .def("is_over", &GpuPoint::is_over, "Whether the GPU has come there, or never will.");
  module.def("gpu_point", &gpu_point, nb::arg("device"), nb::arg("stream"),
             "Where a stream of this rank's GPU is now.");
  module.def("gpu_count", &gpu_count, "How many GPUs this process may use; 0 without a driver that can be used.");
  module.def(
      "needless_sharing", &find_needless_sharing, nb::arg("nodes"), nb::arg("uuids"), nb::arg("visible"),
      "Two ranks of a node that work on the same GPU while another one there is idle, or None. Of every rank its "
      "node, the UUID of its GPU (\"\": none) and how many GPUs it sees.");
  module.def(
      "gpu_uuid", [](int device) { return CudaDriver::get().uuid(device); }, nb::arg("device"),
      "As nvidia-smi shows it.");
  module.def(
      "gpu_has_context", [](int device) { return CudaDriver::get().has_context(device); }, nb::arg("device"),
      "Whether something of this process works on the GPU already.");
  module.def(
      "gpu_of", [](uintptr_t address) { return CudaDriver::get().device_of(address); }, nb::arg("address"),
      "The GPU of this address. Raises ValueError for an address of the host.");
  module.def("nccl_version", &nccl_version, nb::arg("candidates"),
             "(version, path) of the NCCL that operations use: 22703 is 2.27.3. Raises RingtrainError without one.");
}

}  // namespace ringtrain
