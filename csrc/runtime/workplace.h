// Where one thread at a time does work of an Engine: in a lane, or for messages between two ranks.
//
// That thread is busy with the place. It also needs the turn, which a process has once and which it lets go of while it
// waits for other ranks. So everything but waiting is done by one thread at a time, and a place whose thread waits for
// other ranks keeps no other one waiting.
//
// Usually the thread on the lookout works (lookout.h), which sleeps on a bell until a caller submits something or
// another rank asks for something. But where all ranks share memory, a caller that waits for a Handle while nobody is
// busy at its place works itself until it has what it waits for: a small operation would otherwise pay for two
// hand-overs between threads. See waiting_callers.h for what becomes of several.
//
// Where there are several lanes, such a caller sees to all of them: it waits for no rank in the middle of a round, but
// lets go of the place and goes on in a lane whose round needs nothing but this rank. So it never waits for a rank that
// waits for it elsewhere. Two threads of each rank would only take the cores from each other, so where cores are few
// the thread on the lookout stands back meanwhile (Attention).
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread_annotations.h"
#include "base/wait.h"
#include "record/handle.h"
#include "runtime/peer_watch.h"
#include "runtime/waiting_callers.h"

namespace ringtrain {

// Whether the waiting caller has to return (a signal has come). Called by the thread that waits.
using Interrupt = std::function<bool()>;

// Whether callers that wait see to all lanes of an Engine.
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

struct Wait;
class Workplace;

// The other lanes of an Engine, as a caller sees them that works at `own` place, which it has let go of when it helps.
class Neighbours {
 public:
  virtual ~Neighbours() = default;
  // Whether a round of one needs nothing but this rank.
  virtual bool need_help(const Workplace& own) = 0;
  virtual void help(const Workplace& own, const Wait& wait) = 0;
};

// A caller that waits for a Handle.
struct Wait {
  const double returns_s, gives_up_s;
  const Interrupt& is_interrupted;
  double now;                        // when the clock was read last: a look at it takes as long as a small sum
  Neighbours* neighbours = nullptr;  // null where there are none
};

class Workplace {
 public:
  // `bell`: on which the thread on the lookout sleeps. `callers_bell`: on which a caller does that has found nothing to
  // do. `watch`: of the thread that works here. All outlive this.
  Workplace(TurnMutex& turn, Flag& bell, Flag& callers_bell, PeerWatch& watch, Attention& attention)
      : turn_(turn), watch_(watch), bell_(bell), callers_bell_(callers_bell), attention_(attention) {}
  virtual ~Workplace() = default;
  Workplace(const Workplace&) = delete;
  Workplace& operator=(const Workplace&) = delete;

  bool has_ended() const { return has_ended_; }

  // ---- any thread
  // A caller that goes on has submitted something; one that waits comes to work itself.
  void ring_for_new();
  // Where the waiting caller works itself: over a network nobody can stop waiting in the middle of a round, and the way
  // is long anyway.
  virtual bool callers_work() const = 0;
  // Until the Handle is done, its time is over or the work has ended here; whether it is done.
  bool wait(Handle& handle, Wait& wait);

  // Whether nothing is missing here but a thread of this rank.
  bool needs_help() const { return !is_busy_.load(std::memory_order_relaxed) && have_others_come(); }
  // By a caller that waits elsewhere: takes turns while that is so.
  void help(const Wait& wait);

  // ---- a thread on the lookout
  enum class Turns { none, some, more_are_left, left_to_caller };
  // Those that there are, but not for longer than this, and a turn.
  Turns take_turns(double longest_s);
  // Whether nothing goes on here that the bell would have to wake a thread for.
  virtual bool is_quiet() const { return false; }
  bool is_called_for();
  // Whether it lies still since it lay down, so that nothing is to be done here. Cheap: of many places few have work.
  bool is_dormant() { return is_dormant_ && !has_new() && !is_called_by_others(); }
  // Whether the thread may sleep as far as this place is concerned, and for how long: who rings the bell from now on
  // will wake it. Nothing if there is work, or may be.
  std::optional<double> lie_down();

  // ---- with the turn
  // Wakes those that wait for what is done.
  void call_done() REQUIRES(turn) { waiting_callers_.call_done(); }
  // Wakes all that wait: the work has ended here.
  void close() REQUIRES(turn);

 protected:
  // How long it does not look whether the others live: while nobody waits, and while somebody does.
  static constexpr double kLookAround_s = 0.2, kLookAroundInWait_s = 0.05;
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  bool begin_work() TRY_ACQUIRE(true, turn);
  bool gather_and_begin_work() TRY_ACQUIRE(true, turn);
  void end_work() RELEASE(turn);
  // As end_work(), and has somebody come to what is left to do.
  void let_go(bool stays_attentive) RELEASE(turn);
  // The engine fails with what the work throws.
  template <typename Work>
  void guarded(Work work) REQUIRES(turn) {
    if (const std::optional<Error> error = error_of(work)) fail(watch_.with_reason(*error));
  }

  virtual bool has_new() const = 0;
  // Lets more submissions come before the first turn for them.
  virtual void gather() {}
  // Throws if others are gone, or cannot go on.
  virtual void look_after_others() REQUIRES(turn) = 0;
  // Any thread. Whether all other ranks have come to a round, where callers work.
  virtual bool have_others_come() const { return false; }
  // Whether it can go on only when other ranks come.
  virtual bool is_stuck() const REQUIRES(turn) { return false; }
  // While it is stuck: they are to ring when they have come, and those that have not are called.
  virtual void be_called() REQUIRES(turn) {}
  virtual void call_late() REQUIRES(turn) {}
  // Whether a thread on the lookout does that here.
  virtual bool is_looked_after() const REQUIRES(turn) = 0;
  // `now`: when the clock was read last. Returns the same.
  virtual double take_turn(double deadline, double now) REQUIRES(turn) = 0;
  virtual bool has_work() REQUIRES(turn) = 0;
  // Of a caller that goes away: whether another thread has to come at once.
  virtual bool is_left_with_work() REQUIRES(turn) = 0;
  // Any thread, where callers work: whether another rank asks for something.
  virtual bool is_called_by_others() = 0;
  // Whether a caller that waits for a moment keeps its core.
  virtual bool keeps_core() const { return false; }
  // When there will be work even if nobody asks for it.
  virtual double next_deadline() REQUIRES(turn) { return kNever; }
  virtual double pause_s() REQUIRES(turn) = 0;
  virtual void fail(const Error& error) REQUIRES(turn) = 0;
  // The thread is going to sleep on this bell.
  virtual void fall_asleep(Flag& bell) REQUIRES(turn);
  // The next submission rings again. For each fall_asleep(), also where others need not ring.
  void let_new_ring() {
    if (has_rung_for_new_) has_rung_for_new_.exchange(false);
  }
  virtual void stay_awake() REQUIRES(turn);
  // Any thread. There is something to be done that is neither new nor asked for by others; before the bell rings.
  void rouse() { is_dormant_ = false; }

  TurnMutex& turn_;
  PeerWatch& watch_;
  Flag &bell_, &callers_bell_;
  Attention& attention_;
  std::atomic<bool> has_ended_{false};
  WaitingCallers waiting_callers_;  // where callers work
  Patience patience_;               // elsewhere
  // That was met while looking for work.
  std::optional<Error> trouble_ GUARDED_BY(turn);
  Flag* wakes_ GUARDED_BY(turn) = nullptr;  // the bell that wakes a thread for this place

  // Before the turn: whether no thread was busy here, and this one is now.
  bool be_busy() { return !is_busy_.exchange(true, std::memory_order_acquire); }
  void be_free() { is_busy_.store(false, std::memory_order_release); }

 private:
  bool has_waited_enough(const Handle& handle, const Wait& wait) const;
  bool wait_for_work(const Handle& handle, Wait& wait) TRY_ACQUIRE(true, turn);
  void work(const Handle& handle, Wait& wait) REQUIRES(turn);
  bool work_comes(Wait& wait) REQUIRES(turn);
  void work_until_done(const Handle& handle, Wait& wait) RELEASE(turn);
  void keep_bell(const Handle& handle, Wait& wait, uint32_t seen) RELEASE(turn);
  void begin_wait(const Wait& wait) REQUIRES(turn);
  void end_wait() REQUIRES(turn);
  // Since somebody fell asleep: of many submissions in a row only the first one rings.
  std::atomic<bool> has_rung_for_new_{false};
  std::atomic<bool> is_dormant_{false};
  Waiter waiter_ GUARDED_BY(turn);
  std::atomic<bool> is_busy_{false};
};

}  // namespace ringtrain
