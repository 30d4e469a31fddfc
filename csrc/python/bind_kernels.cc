// Arithmetic on arrays in host memory, for what keeps weights: sums, optimizers, and gradients in a few bits.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "base/clock.h"
#include "base/error.h"
#include "kernels/optimize.h"
#include "kernels/quantize.h"
#include "kernels/reduce.h"
#include "kernels/rows.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

// Memory that both processes have mapped, zeroed before each measurement.
struct RoundTripBoard {
  alignas(128) std::atomic<uint32_t> sent;
  alignas(128) std::atomic<uint32_t> returned;
};

constexpr int kBatches = 10, kTripsOfBatch = 200;
// Looking at the clock takes as long as a near trip.
constexpr int kLooksBetweenClocks = 4096;

// Whether ready() came true before the deadline.
template <typename Ready>
bool spin(Ready ready, double deadline) {
  for (int look = 1;; ++look) {
    if (ready()) return true;
    if (look % kLooksBetweenClocks == 0 && now_s() > deadline) return false;
  }
}

double send(RoundTripBoard& board, double deadline) {
  double shortest_s = std::numeric_limits<double>::infinity();
  uint32_t trip = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    const double begin = now_s();
    for (int i = 0; i < kTripsOfBatch; ++i) {
      board.sent.store(++trip, std::memory_order_release);
      if (!spin([&] { return board.returned.load(std::memory_order_acquire) == trip; }, deadline)) return shortest_s;
    }
    shortest_s = std::min(shortest_s, (now_s() - begin) / kTripsOfBatch);
  }
  return shortest_s;
}

void send_back(RoundTripBoard& board, double deadline) {
  for (uint32_t trip = 1; trip <= kBatches * kTripsOfBatch; ++trip) {
    if (!spin([&] { return board.sent.load(std::memory_order_acquire) >= trip; }, deadline)) return;
    board.returned.store(trip, std::memory_order_release);
  }
}

// Returns how far apart two CPUs are just now: the time that a word takes from one process to another and back. Where
// virtual machines move, it is 50-90 ns while the two share a cache and some 500 ns while they do not, and the speed of
// everything in shared memory moves with it.
//
// Called by the two processes at about the same time, by one with `begins`. Both spin, for `limit_s` at most. The
// smallest mean of several batches, which the scheduler has not disturbed; infinity if the other process did not come,
// and 0 in the process that does not begin.
double round_trip_ns(RoundTripBoard& board, bool begins, double limit_s) {
  const double deadline = now_s() + limit_s;
  if (begins) return 1e9 * send(board, deadline);
  send_back(board, deadline);
  return 0;
}

TensorView on_host(const nb::tuple& tuple) {
  TensorView view = to_view(tuple);
  if (view.device != TensorView::kHost) throw invalid("this works on arrays in host memory, not on a GPU");
  return view;
}

TensorView on_host(const nb::tuple& tuple, DType dtype, int64_t count) {
  TensorView view = on_host(tuple);
  if (view.spec.dtype != dtype || view.spec.count() != count)
    throw invalid("an array here must have " + std::to_string(count) + " elements of " + name_of(dtype) +
                  ", but it is " + to_string(view.spec));
  if (reinterpret_cast<uintptr_t>(view.address) % size_of(dtype) != 0)
    throw invalid("an array of " + to_string(view.spec) + " is not on a multiple of its element's bytes: copy it");
  return view;
}

void sum(const std::vector<nb::tuple>& sources, const nb::tuple& destination) {
  if (sources.empty()) throw invalid("a sum needs one array at least");
  const TensorSpec spec = on_host(destination).spec;
  std::vector<const void*> addresses;
  for (const nb::tuple& source : sources) addresses.push_back(on_host(source, spec.dtype, spec.count()).address);
  void* const there = on_host(destination, spec.dtype, spec.count()).address;
  ReleasedGil release;
  const KeptDenormals kept;
  reduce({spec.dtype, Reduce::sum, 1.0}, &there, 1, addresses.data(), static_cast<int>(addresses.size()),
         static_cast<size_t>(spec.count()));
}

void sum_rows_of_views(const nb::tuple& places, const nb::tuple& rows, const nb::tuple& sums, double scale) {
  const TensorView source = on_host(rows), destination = on_host(sums);
  const DType dtype = source.spec.dtype;
  const int64_t count = on_host(places).spec.count();
  const auto first = static_cast<const int64_t*>(on_host(places, DType::int64, count).address);
  if (source.spec.shape.empty() || destination.spec.shape.empty() || source.spec.shape[0] != count)
    throw invalid("a sum of rows needs a place for each row, and arrays of rows, not " + std::to_string(count) +
                  " places, " + to_string(source.spec) + " and " + to_string(destination.spec));
  if (count == 0) return;
  const int64_t elements = source.spec.count() / count;
  const int64_t number = destination.spec.shape[0];
  const void* const there = on_host(rows, dtype, count * elements).address;
  void* const here = on_host(sums, dtype, number * elements).address;
  ReleasedGil release;
  const KeptDenormals kept;
  sum_rows({dtype, Reduce::sum, scale}, here, static_cast<size_t>(number), there, first, static_cast<size_t>(count),
           static_cast<size_t>(elements));
}

void update(const UpdateRule& rule, const nb::tuple& weight, const nb::tuple& grad,
            const std::vector<nb::tuple>& states, int64_t num_update, double lr, double wd) {
  if (num_update < 1) throw invalid("num_update counts from 1, but is " + std::to_string(num_update));
  const TensorSpec spec = on_host(weight).spec;
  UpdateRule::Arrays arrays;
  arrays.dtype = spec.dtype;
  arrays.count = static_cast<size_t>(spec.count());
  arrays.weight = arrays.new_weight = on_host(weight, spec.dtype, spec.count()).address;
  arrays.grad = on_host(grad, spec.dtype, spec.count()).address;
  for (const nb::tuple& state : states) {
    arrays.new_states.push_back(on_host(state, spec.dtype, spec.count()).address);
    arrays.states.push_back(arrays.new_states.back());
  }
  ReleasedGil release;
  const KeptDenormals kept;
  rule.update(arrays, {num_update, lr, wd});
}

struct Quantized {
  Quantizer quantizer;
  float* values;
  uint8_t* codes;
  size_t count;
};

Quantized quantized(const std::string& kind, double threshold, const nb::tuple& values, const nb::tuple& codes) {
  const Quantizer quantizer = make_quantizer(kind, threshold);
  const int64_t count = on_host(values).spec.count();
  const auto bytes = static_cast<int64_t>(quantized_bytes(quantizer.kind, static_cast<size_t>(count)));
  return {quantizer, static_cast<float*>(on_host(values, DType::float32, count).address),
          static_cast<uint8_t*>(on_host(codes, DType::uint8, bytes).address), static_cast<size_t>(count)};
}

void quantize_view(const std::string& kind, double threshold, const nb::tuple& values, const nb::tuple& residual,
                   const nb::tuple& codes) {
  const Quantized all = quantized(kind, threshold, values, codes);
  auto* rest = static_cast<float*>(on_host(residual, DType::float32, static_cast<int64_t>(all.count)).address);
  ReleasedGil release;
  const KeptDenormals kept;
  quantize(all.quantizer, all.values, rest, all.count, all.codes);
}

void dequantize_view(const std::string& kind, double threshold, const nb::tuple& codes, const nb::tuple& values,
                     bool add) {
  const Quantized all = quantized(kind, threshold, values, codes);
  ReleasedGil release;
  const KeptDenormals kept;
  (add ? add_dequantized : dequantize)(all.quantizer, all.codes, all.values, all.count);
}

template <typename T>
void multiply_as(const TensorView& left, const TensorView& right, const TensorView& product, size_t rank) {
  multiply_factors(static_cast<const T*>(left.address), static_cast<const T*>(right.address),
                   static_cast<T*>(product.address), rank, static_cast<size_t>(left.spec.count()) / rank,
                   static_cast<size_t>(right.spec.count()) / rank);
}

void multiply_factor_views(const nb::tuple& left, const nb::tuple& right, const nb::tuple& product) {
  const TensorView of_rows = on_host(left), of_columns = on_host(right);
  const DType dtype = of_rows.spec.dtype;
  if (dtype != DType::float32 && dtype != DType::float64)
    throw invalid("multiply_factors works on float32 and float64, not on " + std::string(name_of(dtype)));
  if (of_rows.spec.shape.size() != 2 || of_columns.spec.shape.size() != 2 || of_rows.spec.shape[0] < 1 ||
      of_rows.spec.shape[0] != of_columns.spec.shape[0])
    throw invalid("factors must be matrices with the same number of rows, not " + to_string(of_rows.spec) + " and " +
                  to_string(of_columns.spec));
  on_host(right, dtype, of_columns.spec.count());
  const TensorView out = on_host(product, dtype, of_rows.spec.shape[1] * of_columns.spec.shape[1]);
  ReleasedGil release;
  const KeptDenormals kept;
  const auto rank = static_cast<size_t>(of_rows.spec.shape[0]);
  (dtype == DType::float32 ? multiply_as<float> : multiply_as<double>)(of_rows, of_columns, out, rank);
}

// MPI_User_function: MPI calls it from whatever thread makes progress, with the address of its datatype at the end.
template <DType dtype>
void sum_for_mpi(void* source, void* source_and_destination, int* count, void*) {
  const void* sources[] = {source, source_and_destination};
  reduce({dtype, Reduce::sum}, &source_and_destination, 1, sources, 2, static_cast<size_t>(*count));
}

// MPI sums all other dtypes itself.
uintptr_t mpi_sum(int dtype) {
  if (static_cast<DType>(dtype) == DType::float16) return reinterpret_cast<uintptr_t>(&sum_for_mpi<DType::float16>);
  if (static_cast<DType>(dtype) == DType::bfloat16) return reinterpret_cast<uintptr_t>(&sum_for_mpi<DType::bfloat16>);
  return 0;
}

}  // namespace

void bind_kernels(nb::module_& module) {
  nb::class_<UpdateRule>(module, "UpdateRule", "How an optimizer changes weights; see csrc/kernels/optimize.h.")
      .def(nb::init<const std::string&, const std::string&, const std::map<std::string, double>&>(), nb::arg("name"),
           nb::arg("form"), nb::arg("numbers"))
      .def_prop_ro("state_names", &UpdateRule::state_names)
      .def("update", &update, nb::arg("weight"), nb::arg("grad"), nb::arg("states"), nb::arg("num_update"),
           nb::arg("lr"), nb::arg("wd"));
  module.def("sum", &sum, nb::arg("sources"), nb::arg("destination"),
             "One pass over arrays of one dtype; the destination may be one of them. See csrc/kernels/reduce.h.");
  module.def("sum_rows", &sum_rows_of_views, nb::arg("places"), nb::arg("rows"), nb::arg("sums"), nb::arg("scale"),
             "sums[place] = scale * the sum of the rows of this place; see csrc/kernels/rows.h.");
  module.def(
      "quantized_bytes",
      [](const std::string& kind, size_t count) { return quantized_bytes(make_quantizer(kind, 1).kind, count); },
      nb::arg("kind"), nb::arg("count"), "How long the codes of so many elements are.");
  module.def("quantize", &quantize_view, nb::arg("kind"), nb::arg("threshold"), nb::arg("values"), nb::arg("residual"),
             nb::arg("codes"), "float32 in two bits or one; see csrc/kernels/quantize.h.");
  module.def("dequantize", &dequantize_view, nb::arg("kind"), nb::arg("threshold"), nb::arg("codes"), nb::arg("values"),
             nb::arg("add"), "Writes the values of the codes, or adds them to the values.");
  module.def("multiply_factors", &multiply_factor_views, nb::arg("left"), nb::arg("right"), nb::arg("product"),
             "product[i, j] = sum over k of left[k, i] * right[k, j]; see csrc/kernels/rows.h.");
}

// The parts of the core that ringtrain.bench needs beside the public API.

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
      "How long a word takes to another process and back. The board is zeroed memory at "
      "a page's beginning.");
}

}  // namespace ringtrain
