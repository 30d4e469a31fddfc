// One per process at a time: owns everything of the core but Resources, and the thread that does the work.
//
// The work goes on in turns: take what is new, negotiate one round, carry out the most urgent plan. One thread at a
// time may take turns. Usually that is the engine's own, which sleeps on a bell until a caller submits something or
// another rank asks for a round. But a caller that waits for a Handle while nobody is at work takes the turns itself
// until it has what it waits for: a small operation would otherwise pay for two hand-overs between threads. See
// waiting_callers.h for what becomes of several.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/options.h"
#include "base/thread_annotations.h"
#include "coordination/backlog.h"
#include "coordination/coordinator.h"
#include "runtime/autotune.h"
#include "runtime/executor.h"
#include "runtime/fabric.h"
#include "runtime/gpus.h"
#include "runtime/inbox.h"
#include "runtime/process_sets.h"
#include "runtime/resources.h"
#include "runtime/waiting_callers.h"

namespace ringtrain {

class Engine {
 public:
  // Whether the waiting caller has to return (a signal has come). Called by the thread that waits.
  using Interrupt = std::function<bool()>;

  // All ranks of the world at the same time. Throws what made it impossible.
  Engine(World world, Options options, std::shared_ptr<Resources> resources);
  // As shutdown().
  ~Engine();

  // Any thread. Does not wake the engine if the caller is going to wait for the Handle at once.
  enum class Caller { goes_on, waits };
  std::shared_ptr<Handle> submit(SubmissionPtr submission, Caller caller);
  // Any thread: whether it is done, after at most `timeout_s`, or a little later if that falls into an operation. If an
  // operation makes no progress and `give_up_s` are over, the engine fails with a StalledError: in the middle of one
  // nobody can leave without taking the others with him.
  bool wait(Handle& handle, double timeout_s, const Interrupt& is_interrupted,
            double give_up_s = std::numeric_limits<double>::infinity());
  // Any thread. This rank's GPU, if it is that one; see Gpus::use.
  GpuPtr gpu(int ordinal) { return gpus_.use(ordinal); }
  std::shared_ptr<char> allocate_on_gpu(int ordinal, size_t bytes) { return gpus_.allocate(ordinal, bytes); }
  // Any thread. Memory for the user's arrays that all ranks of the node can reach, or null where there is none.
  std::shared_ptr<Arena> arena() const { return fabric_.arena(); }
  // Any thread. A file of what this rank does from now on, until stop_timeline(). Throws if it cannot be written.
  void start_timeline(Timeline::Setup setup);
  void stop_timeline() { inbox_.set_timeline(nullptr); }
  void mark(const std::string& text);  // in the timeline, if there is one
  // Any thread. Sets what all threads of this rank that could submit something wait for; nothing if one does not wait.
  void say_blocked(std::vector<std::shared_ptr<Handle>> awaited);
  // Any thread. Has `ask` called when a rank asks all of them where their threads are, since an operation waits for
  // long: on a thread that has the turn, so it must not wait. Its argument says what waits for which ranks.
  void on_question(std::function<void(const std::string&)> ask);
  // Any thread. The answer of this rank: "in load() at train.py:17".
  void answer(std::string whereabouts);
  // Any thread. The last operations, and sums over all of them.
  std::vector<std::pair<SubmissionPtr, Progress>> last_operations() { return inbox_.last_operations(); }
  TotalsOfKinds totals() { return inbox_.totals(); }
  Coordinator::Counts counts() const { return coordinator_.counts(); }
  // Any thread. How long callers have waited for Handles so far, summed over their threads.
  double exposed_s() const { return static_cast<double>(exposed_ns_) * 1e-9; }
  // Any thread. In the world.
  int rank() const { return world_.rank; }
  // Any thread. On how many nodes these ranks are.
  int node_count(const std::vector<int>& ranks) const {
    return static_cast<int>(world_.place(ranks).distinct_nodes().size());
  }
  // Leaves the job: operations that other ranks still wait for fail there. Returns when the thread has ended.
  void shutdown();
  // Any thread. This rank cannot go on: all others get a RemoteError that names it and gives the reason. The first
  // reason counts, so nothing happens if the engine has ended already. Returns when they were told, after `timeout_s`
  // at most.
  void report_failure(const std::string& reason, double timeout_s);
  // Any thread. Somebody who knows better than the network says that another rank is gone: all that waits here fails.
  void report_loss(const std::string& text);
  // Whether it has ended because of an error, its own or that of another rank.
  bool has_failed() const { return has_failed_; }

 private:
  // Engine thread only.
  void loop();
  enum class Turns { none, some, left_to_caller };
  Turns take_all_turns();
  void gather();
  void let_burst_pass();
  bool spin(uint32_t seen);
  bool lie_down();

  // Threads that wait for a Handle.
  struct Wait {
    const double returns_s, gives_up_s;
    const Interrupt& is_interrupted;
    double now;  // when the clock was read last: a look at it takes as long as a small sum
  };
  bool wait_or_work(Handle& handle, Wait& wait);
  bool has_waited_enough(const Handle& handle, const Wait& wait) const;
  bool wait_for_turn(const Handle& handle, Wait& wait) TRY_ACQUIRE(true, turn);
  void take_turns_until_done(const Handle& handle, Wait& wait) RELEASE(turn);
  void keep_bell(const Handle& handle, Wait& wait, uint32_t seen) RELEASE(turn);
  void let_go() RELEASE(turn);

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
  void ask(const std::string& question);
  std::string take_answer();
  void end(const std::vector<int>& left) REQUIRES(turn);
  template <typename Work>
  void guarded(Work work) REQUIRES(turn);
  void fail(const Error& error) REQUIRES(turn);
  std::string names_text(const std::vector<int>& ranks) const;

  // In the node's Arena, or on a GPU in memory of NCCL.
  bool is_registered(const Submission& submission);
  // Over a network nobody can stop waiting in the middle of a round, and the way is long anyway.
  bool callers_take_turns() const { return fabric_.channel().keeps_deadlines(); }

  // Constant after construction.
  const World world_;
  const Options options_;
  const std::shared_ptr<Resources> resources_;  // shared with the Engines before and after this one
  const bool has_to_share_cores_;               // with other threads of this node's ranks

  // Any thread.
  Inbox inbox_;
  std::atomic<bool> is_leaving_{false};
  std::atomic<bool> has_ended_{false};
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_closed_{false};  // has ended, and all that can be told has been told
  // Since somebody fell asleep: of many submissions in a row only the first one rings.
  std::atomic<bool> has_rung_for_new_{false};
  Mutex question_mutex_;
  std::function<void(const std::string&)> ask_ GUARDED_BY(question_mutex_);
  std::string answer_ GUARDED_BY(question_mutex_);
  std::atomic<bool> has_answer_{false};
  std::atomic<uint64_t> exposed_ns_{0};
  WaitingCallers waiting_callers_;  // on one node
  Patience patience_;               // over a network

  TurnMutex turn_;
  Tuning tuning_ GUARDED_BY(turn);
  // Any thread asks these, too, as their functions allow. Its Channel may be asked whether it is called if it keeps
  // deadlines.
  Fabric fabric_;
  ProcessSets sets_ GUARDED_BY(turn);
  Gpus gpus_;
  Coordinator coordinator_;
  BlockedThreads blocked_;
  Executor executor_ GUARDED_BY(turn);
  std::optional<Autotune> autotune_ GUARDED_BY(turn);  // rank 0, while it goes on
  Backlog backlog_ GUARDED_BY(turn);
  Waiter waiter_ GUARDED_BY(turn);
  uint32_t rings_before_round_ GUARDED_BY(turn) = 0;  // of the bell; a rank rings for the next round after it
  double quiet_since_s_ GUARDED_BY(turn) = now_s();
  Coordinator::News news_ GUARDED_BY(turn) = {};     // of the last round that was begun; its memory is used again
  std::optional<Error> trouble_ GUARDED_BY(turn);    // that was met while looking for work
  bool is_counted_asleep_ GUARDED_BY(turn) = false;  // the bell wakes the engine thread

  // Engine thread only.
  Waiter own_waiter_;
  double pause_s_ = 0;

  std::thread thread_;
};

// The one Engine of this process, for every language that submits.
//
// Any thread. Null before init(), after shutdown() and in a forked child. Kept for the length of a call only: the
// thread that lets go of it last takes leave of the other ranks.
std::shared_ptr<Engine> current_engine();
// The same, but throws Error(not_initialized).
std::shared_ptr<Engine> require_engine();
// The result of the Autotune of an Engine of this process. Any thread.
std::string autotune_findings();

// Throws in a process that was forked from a rank. To be called before it meets the others: connections and MPI are
// still those of its parent.
void require_not_forked();
// All ranks of the world at the same time. Throws what made it impossible, as in a process that was forked from a rank.
void start_engine(World world, Options options);
// Leaves the job and ends the Engine, if there is one. Returns whether all was well until then. `by` is for the message
// of later calls: "shutdown() at train.py:40".
bool shut_down_engine(const std::string& by);

}  // namespace ringtrain
