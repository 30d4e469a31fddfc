// Arithmetic on arrays in host memory, for what keeps weights: sums, optimizers, and gradients in a few bits.
#include "base/error.h"
#include "kernels/optimize.h"
#include "kernels/quantize.h"
#include "kernels/reduce.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

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
    throw invalid("an array of " + to_string(view.spec) +
                  " does not lie on a multiple of its element's bytes: copy it");
  return view;
}

void sum(const std::vector<nb::tuple>& sources, const nb::tuple& destination) {
  if (sources.empty()) throw invalid("a sum wants one array at least");
  const TensorSpec spec = on_host(destination).spec;
  std::vector<const void*> addresses;
  for (const nb::tuple& source : sources) addresses.push_back(on_host(source, spec.dtype, spec.count()).address);
  void* const there = on_host(destination, spec.dtype, spec.count()).address;
  ReleasedGil release;
  const KeptDenormals kept;
  reduce({spec.dtype, Reduce::sum, 1.0}, &there, 1, addresses.data(), static_cast<int>(addresses.size()),
         static_cast<size_t>(spec.count()));
}

void update(const UpdateRule& rule, const nb::tuple& weight, const nb::tuple& grad,
            const std::vector<nb::tuple>& states, int64_t num_update, double lr, double wd) {
  if (num_update < 1) throw invalid("num_update counts from 1, but is " + std::to_string(num_update));
  const TensorSpec spec = on_host(weight).spec;
  UpdateRule::Arrays arrays;
  arrays.dtype = spec.dtype;
  arrays.count = static_cast<size_t>(spec.count());
  arrays.weight = on_host(weight, spec.dtype, spec.count()).address;
  arrays.grad = on_host(grad, spec.dtype, spec.count()).address;
  for (const nb::tuple& state : states) arrays.states.push_back(on_host(state, spec.dtype, spec.count()).address);
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
  module.def(
      "quantized_bytes",
      [](const std::string& kind, size_t count) { return quantized_bytes(make_quantizer(kind, 1).kind, count); },
      nb::arg("kind"), nb::arg("count"), "How long the codes of so many elements are.");
  module.def("quantize", &quantize_view, nb::arg("kind"), nb::arg("threshold"), nb::arg("values"), nb::arg("residual"),
             nb::arg("codes"), "float32 in two bits or one; see csrc/kernels/quantize.h.");
  module.def("dequantize", &dequantize_view, nb::arg("kind"), nb::arg("threshold"), nb::arg("codes"), nb::arg("values"),
             nb::arg("add"), "What the codes mean becomes the values, or is added to them.");
}

}  // namespace ringtrain
