// Whether this rank is blocked: all its threads that could submit something wait, and none has what it waits for.
//
// Python knows who waits and for which Handles, but a thread whose Handle is done may need a while to come to run and
// say that it waits no longer. So the Handles are looked at here, too.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "coordination/coordinator.h"
#include "record/handle.h"

namespace ringtrain {

class BlockedThreads {
 public:
  // `coordinator` outlives this.
  explicit BlockedThreads(Coordinator& coordinator) : coordinator_(coordinator) {}

  // Any thread. For what each of the threads waits; nothing if one of them does not.
  void say(std::vector<std::shared_ptr<Handle>> awaited) {
    const Lock lock(mutex_);
    awaited_.swap(awaited);
    tell();
  }

  // Any thread, after Handles were finished.
  void look() {
    const Lock lock(mutex_);
    tell();
  }

 private:
  void tell() REQUIRES(mutex_) {
    const bool none_is_done =
        std::none_of(awaited_.begin(), awaited_.end(), [](const auto& handle) { return handle->is_done(); });
    coordinator_.say_blocked(!awaited_.empty() && none_is_done);
  }

  Coordinator& coordinator_;
  Mutex mutex_;
  std::vector<std::shared_ptr<Handle>> awaited_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
