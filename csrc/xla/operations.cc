#include "xla/operations.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/thread_annotations.h"
#include "runtime/engine.h"

namespace ringtrain::xla {
namespace {

Request request_of(const Call& call) {
  Request request{
      {}, static_cast<int>(call.integer("priority")), std::make_shared<const std::string>(call.text("site"))};
  Operation& operation = request.operation;
  operation.kind = kind_of(call);
  operation.name = call.text("name");
  // Each device of a rank meets the same one of the other ranks.
  if (call.integer("is_per_device") != 0) operation.name += "@" + std::to_string(call.device_ordinal());
  operation.process_set = static_cast<int32_t>(call.integer("process_set"));
  operation.op = static_cast<ReduceOp>(call.integer("op"));
  operation.root = static_cast<int32_t>(call.integer("root"));
  operation.factors = {call.number("prescale"), call.number("postscale")};
  const std::string codes = call.text("codes");
  if (!codes.empty()) operation.quantizer = make_quantizer(codes, call.number("threshold"));
  return request;
}

double number_at(const void* place, DType dtype) {
  if (dtype == DType::float64) return *static_cast<const double*>(place);
  if (dtype == DType::float32) return static_cast<double>(*static_cast<const float*>(place));
  throw invalid(std::string("a weight in XLA's call is a float, not ") + name_of(dtype));
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream rest(text);
  for (std::string line; std::getline(rest, line);) lines.push_back(line);
  return lines;
}

std::string not_finite_text(const Call& call, const int32_t* flags, int64_t count) {
  const std::vector<int64_t> ranks = call.integers("ranks");
  const std::vector<std::string> names = lines_of(call.text("names"));
  for (int64_t i = 0; i < std::min(count, static_cast<int64_t>(names.size())); ++i)
    if (flags[i] != 0)
      return "the gradient of \"" + names[static_cast<size_t>(i)] + "\" is NaN or infinite on rank " +
             std::to_string(ranks.at(ranks.size() - static_cast<size_t>(flags[i]))) +
             "; no rank has updated its parameters with it";
  return "";
}

// The first three, and how many more there are.
std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t kMost = 3;
  std::string text;
  for (size_t i = 0; i < std::min(kMost, names.size()); ++i) text += (i ? ", \"" : "\"") + names[i] + "\"";
  return names.size() > kMost ? text + " and " + std::to_string(names.size() - kMost) + " more" : text;
}

// Whether this is the first time that this process says what begins so. Any thread.
bool is_new(const std::string& beginning) {
  static Mutex mutex;
  static std::set<std::string>& said = *new std::set<std::string>;  // never destroyed, as threads of XLA may use it
  const Lock lock(mutex);
  return said.insert(beginning).second;
}

}  // namespace

std::shared_ptr<Handle> submit(const Call& call, const void* weight, int device, CudaStream stream) {
  SubmissionBuilder builder(request_of(call));
  const auto view_of = [&](Array array) { return TensorView{array.data, std::move(array.spec), device, stream}; };
  const OpKind kind = kind_of(call);
  if (kind != OpKind::barrier) builder.add_input(view_of(call.argument(0)));
  if (is_in_place(kind)) builder.add_output(view_of(call.result(0)));
  if (is_weighted(call)) builder.set_weight(number_at(weight, call.argument(1).spec.dtype));
  builder.set_splits(call.integers("splits"));
  // The next finish() wakes the engine, or does its work.
  return builder.submit(call.integer("is_awaited") != 0 ? Engine::Caller::waits : Engine::Caller::goes_on);
}

void require_in_place(const Call& call) {
  for_each_moved(call, call.results(), [](void*, const void*, size_t) {
    throw failure("XLA has moved an array while it was under way; please report the versions of jax and ringtrain");
  });
}

Failure* failure_of_flags(const Call& call, const int32_t* flags, int64_t count) {
  const std::string text = not_finite_text(call, flags, count);
  if (text.empty()) return nullptr;
  const std::string message = "ringtrain.NonFiniteError: " + text;
  FailureCreate create = {sizeof(FailureCreate), nullptr, message.c_str(), Code::aborted};
  return call.api().create_failure(&create);
}

void report_differences(const std::vector<int32_t>& flags, const std::vector<std::string>& names,
                        const std::string& before, const std::string& after, int64_t rank) {
  std::vector<std::string> differing;
  for (size_t i = 0; i < std::min(flags.size(), names.size()); ++i)
    if (flags[i] != 0) differing.push_back(names[i]);
  if (differing.empty() || require_engine()->rank() != rank || !is_new(before)) return;
  warn(before + some_of(differing) + after);
}

void report_differences(const Call& call, const int32_t* flags, int64_t count) {
  report_differences({flags, flags + count}, lines_of(call.text("names")), call.text("before"), call.text("after"),
                     call.integer("rank"));
}

}  // namespace ringtrain::xla
