// The operations of the world, or of one process set: negotiated between its ranks and carried out by them, whatever
// the other lanes do.
//
// The work of a lane goes on in rounds: take what is new, negotiate with the other ranks, carry out the most urgent
// plan. One thread at a time works in a lane: it is busy with it. That thread also needs the turn, which a process has
// once and which it lets go of while it waits for other ranks. So everything but waiting is done by one thread at a
// time, and a lane that waits for its ranks keeps no other one waiting.
//
// Usually the thread on the lookout works (lookout.h), which sleeps on a bell until a caller submits something or
// another rank asks for a round. But where all ranks of the lane share memory, a caller that waits for a Handle while
// nobody is busy with its lane works itself until it has what it waits for: a small operation would otherwise pay for
// two hand-overs between threads. See waiting_callers.h for what becomes of several.
//
// A lane ends when one of its ranks leaves, and all of its ranks learn that in one round. What it has not agreed on by
// then goes on in the lane of the world, where nothing is lost or done twice: a lane may end at any time. It does
//   - when its process set is removed, or one of its ranks leaves the job;
//   - when all ranks of the job are blocked, since a deadlock may lead over several lanes: that of the world then gets
//     all that is pending, and judges it;
//   - when a rank announces an operation on GPUs: work on GPUs is done in one order, that of the world.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/options.h"
#include "base/thread_annotations.h"
#include "coordination/backlog.h"
#include "coordination/coordinator.h"
#include "runtime/autotune.h"
#include "runtime/executor.h"
#include "runtime/fabric.h"
#include "runtime/inbox.h"
#include "runtime/waiting_callers.h"

namespace ringtrain {

// Whether the waiting caller has to return (a signal has come). Called by the thread that waits.
using Interrupt = std::function<bool()>;

// A caller that waits for a Handle.
struct Wait {
  const double returns_s, gives_up_s;
  const Interrupt& is_interrupted;
  double now;  // when the clock was read last: a look at it takes as long as a small sum
};

class Lane {
 public:
  // What a lane tells its Engine. With the turn; it does not wait, but in end().
  class Owner : public Executor::Sets {
   public:
    // A round asks all ranks of the lane where their threads are.
    virtual void ask(const std::string& question) REQUIRES(turn) = 0;
    // Ranks have left the lane.
    virtual void has_ended(Lane& lane, const std::vector<int>& left) REQUIRES(turn) = 0;
    // In the lane of the world: all others are to end.
    virtual void end_lanes() REQUIRES(turn) = 0;
    virtual void found(const std::string& findings) = 0;  // of autotune
    // Nothing can go on.
    virtual void fail(const Error& error) REQUIRES(turn) = 0;
    // The thread is about to let several submissions come, which may take long.
    virtual void is_about_to_pause() = 0;
  };
  // What all lanes of an Engine work with. All outlive them.
  struct Shared {
    Owner& owner;
    const Options& options;
    TurnMutex& turn;
    Inbox& inbox;
    Fabric& fabric;
    ProcessSets& sets;
    Gpus& gpus;
    Blockage& blockage;
    BlockedThreads& blocked;
    Residuals& residuals;
    const World& world;
    const bool shares_cores;  // with other threads of this node's ranks
  };

  // `autotune`: rank 0's, in the lane of the world; else null.
  Lane(std::shared_ptr<OpenSet> set, const Shared& shared, std::unique_ptr<Autotune> autotune = nullptr);

  int process_set() const { return process_set_; }
  const std::vector<int>& members() const { return set_->membership->ranks(process_set_); }
  bool has_ended() const { return has_ended_; }
  // Whether it is that of a process set whose ranks are all on this node.
  bool is_on_node() const { return process_set_ != 0 && !line_.is_over_network; }

  // ---- any thread
  Arrivals& arrivals() { return arrivals_; }
  // A caller that goes on has submitted something; one that waits comes to work itself.
  void ring_for_new() {
    if (!has_rung_for_new_.exchange(true)) shared_.fabric.bell().ring();
  }
  // Where the waiting caller works itself: over a network nobody can stop waiting in the middle of a round, and the way
  // is long anyway.
  bool callers_work() const { return line_.channel->keeps_deadlines(); }
  // Until the Handle is done, its time is over or the lane has ended; whether it is done.
  bool wait(Handle& handle, Wait& wait);
  void answer(const std::string& whereabouts);  // if it was asked
  Coordinator::Counts counts() const { return coordinator_.counts(); }
  // The next round says that this rank leaves.
  void leave();

  // ---- a thread on the lookout
  enum class Turns { none, some, more_are_left, left_to_caller };
  // Those that there are, but not for longer than this, and a turn.
  Turns take_turns(double longest_s);
  bool has_new() const { return arrivals_.has_new(); }
  // Lets more submissions come before the first turn for them.
  void gather();
  bool is_called_for();
  // Whether the thread may sleep as far as this lane is concerned, and for how long: who rings the bell from now on
  // will wake it. Nothing if there is work, or may be.
  std::optional<double> lie_down();

  // ---- with the turn
  // Goes through rounds until all ranks of the lane have left. By a thread that is not busy with it.
  void drain(Watch& watch) REQUIRES(turn);
  // Carries out what was agreed on, when no more rounds come.
  void carry_out_rest() REQUIRES(turn);
  // When it has ended: what it has not agreed on.
  std::vector<Fresh> take_pending() REQUIRES(turn);
  // From a lane that has ended; before what is new.
  void take_in(std::vector<Fresh> pending) REQUIRES(turn);
  // Wakes all that wait: the lane has ended, or the Engine.
  void close() REQUIRES(turn);

 private:
  bool has_waited_enough(const Handle& handle, const Wait& wait) const;
  bool begin_work() TRY_ACQUIRE(true, turn);
  void end_work() RELEASE(turn);
  bool wait_for_work(const Handle& handle, Wait& wait) TRY_ACQUIRE(true, turn);
  void work_until_done(const Handle& handle, Wait& wait) RELEASE(turn);
  void keep_bell(const Handle& handle, Wait& wait, uint32_t seen) RELEASE(turn);
  void let_go() RELEASE(turn);
  void let_burst_pass();

  void look_after_others() REQUIRES(turn);
  // `now`: when the clock was read last. Returns the same.
  double take_turn(double deadline, double now) REQUIRES(turn);
  bool has_work() REQUIRES(turn);
  // That no other rank asks for.
  bool has_own_work() REQUIRES(turn);
  // Whether another rank calls, or none can any more, which the next turn throws.
  bool is_called() REQUIRES(turn);
  void fall_asleep() REQUIRES(turn);
  void stay_awake() REQUIRES(turn);
  double pause_s() REQUIRES(turn);
  // The clock is read when a round begins, when it is agreed and when a plan has ended: `now` is the last time.
  void enqueue(const Round& round, double now) REQUIRES(turn);
  // `values`: as for Executor::run. When it ended.
  double run_agreed(const Backlog::Agreed& agreed, const std::vector<const void*>& values, double now) REQUIRES(turn);
  double run(const Plan& plan, double agreed_s, double now, const std::vector<const void*>& values) REQUIRES(turn);
  void observe(const Plan& plan, double seconds) REQUIRES(turn);
  std::string take_answer();
  template <typename Work>
  void guarded(Work work) REQUIRES(turn);

  const std::shared_ptr<OpenSet> set_;
  const int process_set_;
  Line& line_;
  const Shared shared_;

  // Any thread.
  Arrivals arrivals_;
  std::atomic<bool> is_leaving_{false};
  std::atomic<bool> has_ended_{false};
  // Since somebody fell asleep: of many submissions in a row only the first one rings.
  std::atomic<bool> has_rung_for_new_{false};
  std::atomic<bool> is_asked_{false}, has_answer_{false};
  Mutex answer_mutex_;
  std::string answer_ GUARDED_BY(answer_mutex_);
  WaitingCallers waiting_callers_;  // where callers work
  Patience patience_;               // elsewhere

  std::mutex busy_;  // before the turn
  Tuning& tuning_ GUARDED_BY(turn);
  Coordinator coordinator_;
  Executor executor_ GUARDED_BY(turn);
  std::unique_ptr<Autotune> autotune_ GUARDED_BY(turn);
  Backlog backlog_ GUARDED_BY(turn);
  Waiter waiter_ GUARDED_BY(turn);
  uint32_t rings_before_round_ GUARDED_BY(turn) = 0;  // of the bell; a rank rings for the next round after it
  double quiet_since_s_ GUARDED_BY(turn) = now_s();
  Coordinator::News news_ GUARDED_BY(turn) = {};     // of the last round begun; its memory is used again
  std::vector<Fresh> taken_in_ GUARDED_BY(turn);     // from lanes that have ended
  std::optional<Error> trouble_ GUARDED_BY(turn);    // that was met while looking for work
  bool is_counted_asleep_ GUARDED_BY(turn) = false;  // the bell wakes a thread for this lane
};

}  // namespace ringtrain
