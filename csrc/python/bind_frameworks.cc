// Operations of MXNet's engine, and the handlers that JAX registers with XLA.
#include <optional>
#include <utility>

#include "mpi_abi/library.h"
#include "mxnet/operation.h"
#include "python/bind.h"
#include "runtime/engine.h"
#include "xla/handlers.h"
#include "xla/operations.h"

namespace ringtrain {
namespace {

template <typename Function>
void find(Function*& function, const std::map<std::string, uintptr_t>& addresses, const char* name) {
  const auto it = addresses.find(name);
  if (it == addresses.end()) throw failure(std::string("this libmxnet.so has no ") + name);
  function = reinterpret_cast<Function*>(it->second);
}

void use(const std::map<std::string, uintptr_t>& addresses) {
  MxnetLibrary library;
  find(library.push_async, addresses, "MXEnginePushAsyncND");
  find(library.shallow_copy, addresses, "MXShallowCopyNDArray");
  find(library.free_array, addresses, "MXNDArrayFree");
  find(library.to_dlpack, addresses, "MXNDArrayToDLPack");
  find(library.last_error, addresses, "MXGetLastError");
  use_mxnet(library);
}

std::vector<void*> to_handles(const std::vector<uintptr_t>& numbers) {
  std::vector<void*> handles;
  handles.reserve(numbers.size());
  for (const uintptr_t number : numbers) handles.push_back(reinterpret_cast<void*>(number));
  return handles;
}

void push(const Operation& operation, const std::vector<uintptr_t>& inputs, const std::vector<uintptr_t>& outputs,
          int priority, const Site& site, std::optional<double> weight) {
  require_engine();
  Request request{operation, priority, site.text};
  ReleasedGil release;  // MXNet may delete what has ended, and wait for a lock
  push_to_mxnet(std::move(request), to_handles(inputs), to_handles(outputs), weight);
}

void raise_failure() {
  if (const std::optional<Error> error = mxnet_failure()) throw *error;
}

}  // namespace

void bind_mxnet(nb::module_& module) {
  module.def("use_mxnet", &use, nb::arg("addresses"), "Where the functions of libmxnet.so are, by name.");
  module.def(
      "mxnet_push", &push, nb::arg("operation"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("priority"),
      nb::arg("site"), nb::arg("weight").none() = nb::none(),
      "Hands an operation to MXNet's engine, which begins it when its arrays are computed. Arrays are handles of "
      "NDArrays; without inputs it works in place. weight: as for submit().");
  module.def("mxnet_pending", &pending_in_mxnet, "How many of them are not done.");
  module.def("mxnet_raise_failure", &raise_failure, "Raises with what the engine ended, if one of them has met it.");
  module.def("mxnet_forget_failure", &forget_mxnet_failure);
}

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
  on_cpu["ringtrain_report_differences"] = capsule_of(&xla::report_differences);
  on_gpu["ringtrain_start"] = capsule_of(&xla::on_gpu::start);
  on_gpu["ringtrain_finish"] = capsule_of(&xla::on_gpu::finish);
  on_gpu["ringtrain_require_finite"] = capsule_of(&xla::on_gpu::require_finite);
  on_gpu["ringtrain_report_differences"] = capsule_of(&xla::on_gpu::report_differences);
  all["cpu"] = on_cpu;
  all["CUDA"] = on_gpu;
  return all;
}

}  // namespace

void bind_xla(nb::module_& module) {
  module.def(
      "xla_handlers", &xla_handlers, nb::arg("minor_version"),
      "By platform and name the functions that XLA calls, which tell it that they are written for version 0.minor.");
  module.def(
      "report_differences",
      [](const std::vector<int32_t>& flags, const std::vector<std::string>& names, const std::string& before,
         const std::string& after, int64_t rank) { xla::report_differences(flags, names, before, after, rank); },
      nb::arg("flags"), nb::arg("names"), nb::arg("before"), nb::arg("after"), nb::arg("rank"),
      "Warns once, on that rank, that the ranks differ in what is flagged.");
  module.def("wait_for_xla", &xla::wait_for_all, nb::arg("timeout_s"), nb::call_guard<ReleasedGil>(),
             "Whether all that programs of XLA have started is over, after at most so many seconds.");
  module.def(
      "awaited_by_xla",
      [] {
        std::vector<SharedHandle> shared;
        for (const auto& handle : xla::awaited()) shared.push_back({handle});
        return shared;
      },
      "For what programs of XLA wait now.");
  module.def("is_loaded_by_jaxlib", &mpi_abi::is_loaded,
             "Whether jaxlib has found its MPI here, for which it looks once, when it is loaded.");
  module.def("carry_collectives_of_xla", &mpi_abi::attach, nb::arg("rank"), nb::arg("size"),
             "Lets the ranks of the engine be those of XLA's \"mpi\" collectives.");
  module.def("has_meshes_of_xla", &mpi_abi::has_meshes, "Whether programs of XLA have sent anything.");
}

}  // namespace ringtrain
