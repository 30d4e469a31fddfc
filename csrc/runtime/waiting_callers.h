// The callers that wait for a Handle and do not have the engine's turn.
//
// The thread that has the turn finishes their Handles as well, and calls those whose Handles are done. Each sleeps at a
// place of its own, except one that has had the turn and found nothing to do: it sleeps on the engine's bell (it keeps
// the bell) and comes back when that rings. A thread that lets go of the turn calls one of the others if nobody keeps
// the bell. So somebody always goes on with the work, and nobody has to poll.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "base/wait.h"
#include "coordination/blockage.h"
#include "record/handle.h"

namespace ringtrain {

// How long an engine whose ranks are on several nodes waits for more submissions before it begins a round.
//
// A round over a network takes long, and so does an operation with a gradient or two. While nobody waits for a result
// it is better to let several come: the processor is left to computations. As soon as a caller waits, nothing is held
// back.
class Patience {
 public:
  // Any thread. While one of these lives, a caller waits for a result.
  class Hurry {
   public:
    explicit Hurry(Patience& patience) : patience_(patience) {
      patience_.in_a_hurry_.fetch_add(1, std::memory_order_seq_cst);
      patience_.hurry_.ring();
    }
    ~Hurry() { patience_.in_a_hurry_.fetch_sub(1, std::memory_order_relaxed); }
    Hurry(const Hurry&) = delete;
    Hurry& operator=(const Hurry&) = delete;

   private:
    Patience& patience_;
  };

  // The engine's thread, which alone takes turns over a network, from here on.
  bool is_hurried() const { return in_a_hurry_.load(std::memory_order_seq_cst) > 0; }
  // How long a round has taken. The quickest ones count: others have waited for a rank that was late.
  void note_round(double seconds) { quickest_round_s_ = std::min(seconds, 1.05 * quickest_round_s_); }
  void let_several_come() {
    constexpr double kRounds = 16, kLongest_s = 10e-3;
    const double end = now_s() + std::min(kRounds * quickest_round_s_, kLongest_s);
    for (double now = now_s(); now < end; now = now_s()) {
      const uint32_t seen = hurry_.value.load(std::memory_order_acquire);
      if (is_hurried()) return;
      hurry_.sleep(seen, end - now);
    }
  }

 private:
  std::atomic<int> in_a_hurry_{0};
  Flag hurry_;
  double quickest_round_s_ = 1;
};

// Whether this rank is blocked: all its threads that could submit something wait, and none has what it waits for.
//
// Python knows who waits and for which Handles, but a thread whose Handle is done may need a while to come to run and
// say that it waits no longer. So the Handles are looked at here, too.
class BlockedThreads {
 public:
  // `blockage` outlives this.
  explicit BlockedThreads(Blockage& blockage) : blockage_(blockage) {}

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
    blockage_.say(!awaited_.empty() && none_is_done);
  }

  Blockage& blockage_;
  Mutex mutex_;
  std::vector<std::shared_ptr<Handle>> awaited_ GUARDED_BY(mutex_);
};

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
  // All of them: nobody works here any more.
  void call_all() REQUIRES(turn);
  // One to go on with the work, unless there is none or one keeps the bell; whether one comes. For a thread that let go
  // of the turn.
  bool call_next();

 private:
  std::atomic<int> count_{0};
  Mutex mutex_;
  std::vector<Caller*> callers_ GUARDED_BY(mutex_);  // in the order in which they came
};

}  // namespace ringtrain
