// What there is of GPUs, for who asks before anything is done with them.
#include "fabric/cuda.h"
#include "fabric/nccl.h"
#include "python/bind.h"

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

std::pair<int, std::string> nccl_version(const std::vector<NcclCandidate>& candidates) {
  const NcclLibrary& library = NcclLibrary::open(candidates);
  return {library.version(), library.path()};
}

}  // namespace

void bind_gpu(nb::module_& module) {
  module.def("gpu_count", &gpu_count, "How many GPUs this process may use; 0 without a driver that can be used.");
  module.def(
      "gpu_uuid", [](int device) { return CudaDriver::get().uuid(device); }, nb::arg("device"),
      "As nvidia-smi shows it.");
  module.def(
      "gpu_has_context", [](int device) { return CudaDriver::get().has_context(device); }, nb::arg("device"),
      "Whether something of this process works on the GPU already.");
  module.def(
      "gpu_of", [](uintptr_t address) { return CudaDriver::get().device_of(address); }, nb::arg("address"),
      "The GPU on which the address lies. Raises ValueError if it lies on none.");
  module.def("nccl_version", &nccl_version, nb::arg("candidates"),
             "(version, path) of the NCCL that operations use: 22703 is 2.27.3. Raises RingtrainError without one.");
}

}  // namespace ringtrain
