// Whether callers that wait see to all lanes of an Engine: where a rank has no core of its own, the thread on the
// lookout then only keeps them from it, so it stands back for a moment.
#pragma once

#include <atomic>
#include <utility>

namespace ringtrain {

class Attention {
 public:
  // A caller sees to all, until it has what it waits for or sleeps in the middle of an operation.
  void begin() {
    if (!std::exchange(is_counted, true)) count_.fetch_add(1, std::memory_order_relaxed);
  }
  // Returns whether it did, and nobody does any more.
  bool end() { return std::exchange(is_counted, false) && count_.fetch_sub(1, std::memory_order_relaxed) == 1; }
  bool any() const { return count_.load(std::memory_order_relaxed) > 0; }

 private:
  static inline thread_local bool is_counted = false;
  std::atomic<int> count_{0};
};

}  // namespace ringtrain
