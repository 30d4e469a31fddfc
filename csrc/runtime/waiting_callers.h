// The callers that wait for a Handle and do not have the engine's turn.
//
// The thread that has the turn finishes their Handles as well, and calls those whose Handles are done. Each sleeps at a
// place of its own, except one that has had the turn and found nothing to do: it sleeps on the engine's bell (it keeps
// the bell) and comes back when that rings. A thread that lets go of the turn calls one of the others if nobody keeps
// the bell. So somebody always goes on with the work, and nobody has to poll.
#pragma once

#include <atomic>
#include <vector>

#include "base/thread_annotations.h"
#include "base/wait.h"
#include "record/handle.h"

namespace ringtrain {

// Any thread.
class WaitingCallers {
 public:
  // One of them, as long as it lives. Then its thread must try to take the turn once more, even if it has what it
  // waited for: it may have been called to go on with the work.
  class Caller {
   public:
    // `kept_bell`: where it is going to sleep; null for its own place. All three outlive this.
    Caller(WaitingCallers& all, const Handle& handle, Flag* kept_bell);
    ~Caller();
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;

    // At its own place, until it is called or its Handle is done, for at most `timeout_s`.
    void sleep(double timeout_s);

   private:
    friend WaitingCallers;
    bool is_called() const { return called_.reached(1); }
    void call();

    WaitingCallers& all_;
    const Handle& handle_;
    Flag* const kept_bell_;
    Flag called_;
  };

  bool any() const { return count_.load(std::memory_order_seq_cst) > 0; }
  // Those whose Handles are done.
  void call_done() REQUIRES(turn);
  // One to go on with the work, unless there is none or one keeps the bell; whether one comes. For who has just let go
  // of the turn.
  bool call_next();

 private:
  std::atomic<int> count_{0};
  Mutex mutex_;
  std::vector<Caller*> callers_ GUARDED_BY(mutex_);  // in the order in which they came
};

}  // namespace ringtrain
