// The completion of one push or pull of some keys.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/thread_annotations.h"
#include "base/wait.h"

namespace ringtrain {

// Any thread.
class StoreHandle {
 public:
  // Whether it is done, or has failed.
  bool is_done() const { return done_.reached(1); }
  // Whether nobody reads or writes its arrays any more.
  bool is_memory_free() const { return left_.load(std::memory_order_acquire) == 0; }
  // Once it is done. Throws what it has failed with.
  void require_success();
  // Sleeps until it is done, or so long.
  void sleep(double longest_s) { done_.sleep(0, longest_s); }

  // Called after each wait that has not ended. Returns true once in each `period_s` of the waits.
  bool is_waited_for_again(double now, double period_s);

  // Before it begins: its track in the timeline, and its kind, a literal.
  void show(std::string track, const char* kind);

  // For its executor: it has so many more parts; one of them has ended, well or not. The first part is that of the call
  // that begins it, and ends when all others have begun.
  void expect(int parts) { left_.fetch_add(parts, std::memory_order_relaxed); }
  void end_one(const std::optional<Error>& error);
  // It has failed, whatever becomes of its parts.
  void fail(const Error& error);

 private:
  std::string track_;  // empty: it is not shown
  const char* kind_ = "";
  double begin_s_ = 0;
  std::atomic<int> left_{1};
  std::atomic<double> period_ends_s_{0};  // 0: nobody has waited
  Flag done_;
  Mutex mutex_;
  std::optional<Error> error_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
