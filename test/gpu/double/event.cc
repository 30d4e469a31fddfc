#include "event.h"

#include "call.h"
#include "handles.h"

namespace gpu_double {
namespace {

Handles<Event>& events() {
  static auto* const all = new Handles<Event>(0x520000000000);
  return *all;
}

}  // namespace

void Event::record(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  last_ = std::make_shared<const Point>(stream->context.enqueue(stream, [] {}));
}

std::shared_ptr<const Point> Event::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

CUevent open_event(Context& context) { return events().add(std::make_shared<Event>(context)); }

std::shared_ptr<Event> event_of(CUevent handle) {
  const std::shared_ptr<Event> event = events().find(handle);
  if (event == nullptr) throw Refusal{result::kInvalidHandle, "no event"};
  return event;
}

void destroy_event(CUevent handle) {
  if (events().remove(handle) == nullptr) throw Refusal{result::kInvalidHandle, "no event"};
}

void forget_events_of(const Context& context) {
  events().remove_if([&](const Event& event) { return &event.context == &context; });
}

size_t count_events() { return events().count(); }

}  // namespace gpu_double
