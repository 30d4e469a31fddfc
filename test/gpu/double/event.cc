#include "event.h"

#include <time.h>

#include "call.h"
#include "handles.h"

namespace gpu_double {
namespace {

Handles<Event>& events() {
  static auto* const all = new Handles<Event>(0x520000000000);
  return *all;
}

double now_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

void Event::record(const std::shared_ptr<Stream>& stream) {
  const auto record = std::make_shared<Record>();
  const std::lock_guard<std::mutex> lock(mutex_);
  record->point = stream->context.enqueue(stream, [record] { record->reached_at_s = now_s(); });
  last_ = record;
}

std::shared_ptr<const Event::Record> Event::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

CUevent open_event(Context& context, unsigned flags) { return events().add(std::make_shared<Event>(context, flags)); }

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
