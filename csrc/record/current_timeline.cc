#include "record/current_timeline.h"

#include <atomic>

#include "base/thread_annotations.h"

namespace ringtrain {
namespace {

struct Announced {
  Mutex mutex;
  std::weak_ptr<Timeline> timeline GUARDED_BY(mutex);
  std::atomic<bool> may_be_there{false};
};

// Threads may ask until the process ends.
Announced& announced() {
  static Announced* const one = new Announced;
  return *one;
}

}  // namespace

void announce_timeline(const std::shared_ptr<Timeline>& timeline) {
  Announced& here = announced();
  const Lock lock(here.mutex);
  here.timeline = timeline;
  here.may_be_there = timeline != nullptr;
}

bool may_have_timeline() { return announced().may_be_there.load(std::memory_order_relaxed); }

std::shared_ptr<Timeline> current_timeline() {
  if (!may_have_timeline()) return nullptr;
  Announced& here = announced();
  const Lock lock(here.mutex);
  return here.timeline.lock();
}

}  // namespace ringtrain
