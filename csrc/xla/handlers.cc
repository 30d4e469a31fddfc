#include "xla/handlers.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <sstream>
#include <utility>

#include "base/wait.h"
#include "runtime/submission_builder.h"
#include "xla/call.h"
#include "xla/completer.h"
#include "xla/tickets.h"

namespace ringtrain::xla {
namespace {

std::atomic<int> api_minor{1};

// Calls execute(call), which returns a Failure or throws, if XLA wants the work done and nothing else.
template <typename Execute>
Failure* handle(CallFrame* frame, Execute execute) {
  if (answers_metadata(*frame, api_minor) || frame->stage != CallFrame::kExecute) return nullptr;
  Failure* failure = nullptr;
  const auto error = error_of([&] { failure = execute(Call(*frame)); });
  return error ? failure_of(*frame->api, *error) : failure;
}

bool is_in_place(OpKind kind) { return kind == OpKind::allreduce || kind == OpKind::broadcast; }

OpKind kind_of(const Call& call) { return static_cast<OpKind>(call.integer("kind")); }

Request request_of(const Call& call) {
  Request request{
      {}, static_cast<int>(call.integer("priority")), std::make_shared<const std::string>(call.text("site"))};
  Operation& operation = request.operation;
  operation.kind = kind_of(call);
  operation.name = call.text("name");
  operation.process_set = static_cast<int32_t>(call.integer("process_set"));
  operation.op = static_cast<ReduceOp>(call.integer("op"));
  operation.root = static_cast<int32_t>(call.integer("root"));
  operation.factors = {call.number("prescale"), call.number("postscale")};
  const std::string codes = call.text("codes");
  if (!codes.empty()) operation.quantizer = make_quantizer(codes, call.number("threshold"));
  return request;
}

std::shared_ptr<Handle> submit(const Call& call) {
  SubmissionBuilder builder(request_of(call));
  const OpKind kind = kind_of(call);
  if (kind != OpKind::barrier) {
    Array array = call.argument(0);
    builder.add_input({array.data, std::move(array.spec)});
  }
  if (is_in_place(kind)) {
    Array array = call.result(0);
    builder.add_output({array.data, std::move(array.spec)});
  }
  builder.set_splits(call.integers("splits"));
  // What is finished next wakes the engine, or does its work.
  return builder.submit(call.integer("is_awaited") != 0 ? Engine::Caller::waits : Engine::Caller::goes_on);
}

// Of the results in place, which must be where the engine has written them. XLA may have copied what it was given.
void require_in_place(const Call& call) {
  for (int64_t i = 0; i < call.results(); ++i)
    if (call.argument_address(i) != call.result_address(i) && call.result(i).spec.count() > 0)
      throw failure("XLA has moved an array while it was under way; please report the versions of jax and ringtrain");
}

void copy_through(const Call& call, int64_t results) {
  for (int64_t i = 0; i < results; ++i)
    if (call.argument_address(i) != call.result_address(i) && call.result(i).spec.count() > 0)
      std::memcpy(call.result_address(i), call.argument_address(i), call.result(i).spec.bytes());
}

Completion completion_of(const Call& call) {
  std::vector<uint32_t> numbers;
  for (int64_t i = 0; i < call.integer("tickets"); ++i) numbers.push_back(call.argument_word(call.results() + i));
  std::vector<Completion::Copy> copies;
  const OpKind kind = kind_of(call);
  if (is_in_place(kind))
    require_in_place(call);
  else if (kind == OpKind::barrier)
    copy_through(call, call.results());
  else
    for (int64_t i = 0; i < call.results(); ++i)
      copies.push_back({numbers[static_cast<size_t>(i)], call.result_address(i), call.result(i).spec.bytes()});
  return {call.api(), numbers, std::move(copies)};
}

std::string not_finite_text(const Call& call, const int32_t* flags, int64_t count) {
  const std::vector<int64_t> ranks = call.integers("ranks");
  std::istringstream names(call.text("names"));
  std::string name;
  for (int64_t i = 0; i < count && std::getline(names, name); ++i)
    if (flags[i] != 0)
      return "the gradient of \"" + name + "\" is NaN or infinite on rank " +
             std::to_string(ranks.at(ranks.size() - static_cast<size_t>(flags[i]))) +
             "; no rank has updated its parameters with it";
  return "";
}

}  // namespace

void set_api_version(int minor) { api_minor = minor; }

Failure* start(CallFrame* frame) {
  return handle(frame, [](const Call& call) -> Failure* {
    Started started;
    started.error = error_of([&] { started.handle = submit(call); });
    call.result_word(call.results() - 1) = tickets().add(std::move(started));
    return nullptr;
  });
}

Failure* finish(CallFrame* frame) {
  return handle(frame, [](const Call& call) -> Failure* {
    Completion completion = completion_of(call);
    if (completion.is_done()) {
      const std::optional<Error> error = completion.take_results();
      return error ? failure_of(call.api(), *error) : nullptr;
    }
    Failure* failure = nullptr;
    completion.future = call.promise(failure);
    if (failure) return failure;
    completer().post(std::move(completion));
    return nullptr;
  });
}

Failure* require_finite(CallFrame* frame) {
  return handle(frame, [](const Call& call) -> Failure* {
    const Array flags = call.argument(1);
    const std::string text = not_finite_text(call, static_cast<const int32_t*>(flags.data), flags.spec.count());
    if (!text.empty()) {
      const std::string message = "ringtrain.NonFiniteError: " + text;
      FailureCreate create = {sizeof(FailureCreate), nullptr, message.c_str(), Code::aborted};
      return call.api().create_failure(&create);
    }
    copy_through(call, 1);
    return nullptr;
  });
}

bool wait_for_all(double timeout_s) {
  return Waiter::comes_true([] { return tickets().are_free(); }, timeout_s);
}

}  // namespace ringtrain::xla
