#include "xla/handlers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/wait.h"
#include "xla/completer.h"
#include "xla/operations.h"

namespace ringtrain::xla {
namespace {

// A call for so few elements waits in XLA's own thread for about as long as two threads take to hand it over. After
// that XLA does other work: it may have one thread only.
constexpr int64_t kFew = 4096;
constexpr double kHandOver_s = 1e-4;
// Of messages, whose values the thread that waits carries itself.
constexpr double kMessage_s = 2e-3;

void copy_through(const Call& call, int64_t results) {
  for_each_moved(call, results, [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
}

// Whether the messages of one exchange end here and now, and well.
bool is_exchanged(const Call& call) {
  require_in_place(call);
  const uint32_t ticket = call.argument_word(call.results());
  const Started started = tickets().await(ticket);
  if (started.error || !started.wait(kMessage_s) || error_of([&] { started.require(); })) return false;
  tickets().forget(ticket);
  return true;
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

}  // namespace

Failure* start(CallFrame* frame) {
  return handle(frame, [](const Call& call) -> Failure* {
    Started started;
    const bool is_exchange = kind_of(call) == OpKind::transfer;
    if (is_exchange) started.exchange = std::make_shared<Exchange>();
    started.error = error_of([&] {
      if (is_exchange)
        started.exchange->begin(call);
      else
        started.handle = submit(call, is_weighted(call) ? call.argument_address(1) : nullptr);
    });
    call.result_word(call.results() - 1) = tickets().add(std::move(started));
    return nullptr;
  });
}

Failure* finish(CallFrame* frame) {
  return handle(frame, [](const Call& call) -> Failure* {
    const bool is_exchange = kind_of(call) == OpKind::transfer;
    if (is_exchange && is_exchanged(call)) return nullptr;
    Completion completion = completion_of(call);
    const bool waits_here = !is_exchange && call.result_elements() <= kFew;
    const bool is_done = completion.is_done() || (waits_here && completion.wait(kHandOver_s));
    if (is_done && !completion.has_failed_early()) {
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
    if (Failure* failure = failure_of_flags(call, static_cast<const int32_t*>(flags.data), flags.spec.count()))
      return failure;
    copy_through(call, 1);
    return nullptr;
  });
}

Failure* report_differences(CallFrame* frame) {
  return handle(frame, [](const Call& call) -> Failure* {
    const Array flags = call.argument(1);
    const auto* values = static_cast<const int32_t*>(flags.data);
    const auto count = static_cast<int64_t>(flags.spec.count());
    if (std::any_of(values, values + count, [](int32_t flag) { return flag != 0; }))
      xla::report_differences(call, values, count);
    copy_through(call, 1);
    return nullptr;
  });
}

std::vector<std::shared_ptr<Handle>> awaited() { return tickets().awaited(); }

bool wait_for_all(double timeout_s) {
  return Waiter::comes_true([] { return tickets().are_free(); }, timeout_s);
}

}  // namespace ringtrain::xla
