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
  struct Record {
    Point point;
    double reached_at_s = 0;  // written by the stream before the point is reached
  };

  Event(Context& of, unsigned with_flags) : context(of), flags(with_flags) {}

  void record(const std::shared_ptr<Stream>& stream);
  // Null if it was never recorded.
  std::shared_ptr<const Record> last() const;

  Context& context;
  const unsigned flags;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Record> last_;  // guarded by mutex_
};

CUevent open_event(Context& context, unsigned flags);
std::shared_ptr<Event> event_of(CUevent handle);
void destroy_event(CUevent handle);
void forget_events_of(const Context& context);
size_t count_events();

}  // namespace gpu_double
