// The threads that work for the lanes of an Engine when no caller does.
//
// One of them is on the lookout: it sleeps until a lane has work, and does it. Where it has to wait for other ranks in
// the middle of that, it hands the lookout over to another one, so there are as many as lanes wait at the same time,
// and one more. While there is one lane, and no message, there is one thread.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "base/thread_annotations.h"

namespace ringtrain {

class Lookout {
 public:
  // `look_out`: returns when is_here() does not hold any more, or all is over.
  explicit Lookout(std::function<void()> look_out) : look_out_(std::move(look_out)) {}
  ~Lookout() { end(); }

  void start();
  // Any thread. Whether it is on the lookout.
  static bool is_here();
  // Any thread. If it is on the lookout and `is_shared`, another one takes its place.
  void hand_over();
  // Any thread. From now on there are several lanes, or messages.
  void share() { is_shared_ = true; }
  bool is_shared() const { return is_shared_; }
  // Joins all threads, which end when look_out() returns by itself.
  void end();

 private:
  void run();

  const std::function<void()> look_out_;
  std::atomic<bool> is_shared_{false};
  Mutex mutex_;
  Condition free_;
  bool is_taken_ GUARDED_BY(mutex_) = false;
  bool is_over_ GUARDED_BY(mutex_) = false;
  int spare_ GUARDED_BY(mutex_) = 0;  // threads that wait for their turn on the lookout
  std::vector<std::thread> threads_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
