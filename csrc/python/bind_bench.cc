// What ringtrain.bench needs of the core beside the public API.
#include "bench/round_trip.h"
#include "kernels/reduce.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

// MPI_User_function: MPI calls it from whatever thread makes progress, with the address of its datatype at the end.
template <DType dtype>
void sum(void* source, void* source_and_destination, int* count, void*) {
  const void* sources[] = {source, source_and_destination};
  reduce({dtype, Reduce::sum}, &source_and_destination, 1, sources, 2, static_cast<size_t>(*count));
}

// MPI sums all other dtypes itself.
uintptr_t mpi_sum(int dtype) {
  if (static_cast<DType>(dtype) == DType::float16) return reinterpret_cast<uintptr_t>(&sum<DType::float16>);
  if (static_cast<DType>(dtype) == DType::bfloat16) return reinterpret_cast<uintptr_t>(&sum<DType::bfloat16>);
  return 0;
}

}  // namespace

void bind_bench(nb::module_& module) {
  module.def(
      "scale",
      [](int dtype, double factor, uintptr_t destination, uintptr_t source, size_t count) {
        scale(static_cast<DType>(dtype), factor, reinterpret_cast<void*>(destination),
              reinterpret_cast<const void*>(source), count);
      },
      nb::arg("dtype"), nb::arg("factor"), nb::arg("destination"), nb::arg("source"), nb::arg("count"),
      nb::call_guard<ReleasedGil>(), "destination = source * factor, with the kernels of the core.");
  module.def("mpi_sum", &mpi_sum, nb::arg("dtype"),
             "The address of an MPI_User_function that sums a 16-bit float dtype; 0 for all others.");
  module.attr("ROUND_TRIP_BYTES") = sizeof(RoundTripBoard);
  module.def(
      "round_trip_ns",
      [](uintptr_t board, bool begins, double limit_s) {
        return round_trip_ns(*reinterpret_cast<RoundTripBoard*>(board), begins, limit_s);
      },
      nb::arg("board"), nb::arg("begins"), nb::arg("limit_s"), nb::call_guard<ReleasedGil>(),
      "How long a word takes to another process and back; see csrc/bench/round_trip.h. The board is zeroed memory at "
      "a page's beginning.");
}

}  // namespace ringtrain
