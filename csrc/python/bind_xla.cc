// The handlers that XLA calls, as functions that JAX can register.
#include "python/bind.h"
#include "xla/gpu_handlers.h"
#include "xla/handlers.h"
#include "xla/operations.h"

namespace ringtrain {
namespace {

nb::capsule capsule_of(xla::Failure* (*handler)(xla::CallFrame*)) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict xla_handlers(int minor_version) {
  xla::set_api_version(minor_version);
  nb::dict on_cpu, on_gpu, all;
  on_cpu["ringtrain_start"] = capsule_of(&xla::start);
  on_cpu["ringtrain_finish"] = capsule_of(&xla::finish);
  on_cpu["ringtrain_require_finite"] = capsule_of(&xla::require_finite);
  on_gpu["ringtrain_start"] = capsule_of(&xla::on_gpu::start);
  on_gpu["ringtrain_finish"] = capsule_of(&xla::on_gpu::finish);
  on_gpu["ringtrain_require_finite"] = capsule_of(&xla::on_gpu::require_finite);
  all["cpu"] = on_cpu;
  all["CUDA"] = on_gpu;
  return all;
}

}  // namespace

void bind_xla(nb::module_& module) {
  module.def(
      "xla_handlers", &xla_handlers, nb::arg("minor_version"),
      "By platform and name the functions that XLA calls, which tell it that they are written for version 0.minor.");
  module.def("wait_for_xla", &xla::wait_for_all, nb::arg("timeout_s"), nb::call_guard<ReleasedGil>(),
             "Whether all that programs of XLA have started is over, after at most so many seconds.");
}

}  // namespace ringtrain
