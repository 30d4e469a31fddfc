// The last resort where a library call may block for ever.
#pragma once

#include <condition_variable>
#include <memory>
#include <string>

#include "base/thread_annotations.h"

namespace ringtrain {

// Ends the process with exit status 1 after some seconds, whatever its threads are stuck in, unless cancelled before.
class ExitTimer {
 public:
  // `message` is then written to standard error.
  ExitTimer(double seconds, std::string message);
  // Any thread. Nothing happens from then on.
  void cancel();

 private:
  struct State {
    Mutex mutex;
    std::condition_variable_any has_changed;
    bool is_cancelled GUARDED_BY(mutex) = false;
  };

  // Shared with the timer's thread, which may outlive this.
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace ringtrain
