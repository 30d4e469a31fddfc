// Events: the last place in a stream at which one was recorded.
//
// Any thread.
#pragma once

#include <memory>
#include <mutex>

#include "context.h"

namespace gpu_double {

class Event {
 public:
  explicit Event(Context& of) : context(of) {}

  void record(const std::shared_ptr<Stream>& stream);
  // Null if it was never recorded.
  std::shared_ptr<const Point> last() const;

  Context& context;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Point> last_;  // guarded by mutex_
};

CUevent open_event(Context& context);
std::shared_ptr<Event> event_of(CUevent handle);
void destroy_event(CUevent handle);
void forget_events_of(const Context& context);
size_t count_events();

}  // namespace gpu_double
