// Operations of one name go to the engine in the order in which they were pushed. MXNet's workers run what is ready in
// any order, and ranks that took two operations of one name for each other would sum what does not belong together.
#pragma once

#include <deque>
#include <functional>
#include <map>

#include "base/thread_annotations.h"
#include "coordination/operation.h"

namespace ringtrain {

class Lines {
 public:
  // Stays where it is until it was called or has left.
  struct Waiting {
    std::function<void()> begin;  // may destroy this object
    bool is_ready = false;
  };

  // Any thread, as all else. Keys are copies: a callback may destroy the original.
  void join(const Key& key, Waiting* waiting);
  // It is called once all before it in its line were called or have left: here, or on another thread. No lock is held
  // then.
  void ready(Key key, Waiting* waiting);
  // Does nothing if it was called.
  void leave(Key key, const Waiting* waiting);

 private:
  struct Line {
    std::deque<Waiting*> waiting;
    bool is_served = false;  // by a thread that looks again when it has called one
  };

  void serve(const Key& key);
  std::function<void()> next(const Key& key);

  Mutex mutex_;
  std::map<Key, Line> lines_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
