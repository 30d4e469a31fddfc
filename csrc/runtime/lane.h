// The operations of the world, or of one process set: negotiated between its ranks and carried out by them, whatever
// the other lanes do.
//
// The work of a lane goes on in rounds: take what is new, negotiate with the other ranks, carry out the most urgent
// plan. See workplace.h for the threads that do it.
//
// Over a long link, while more plans wait, the words of the next round travel behind the last messages of a plan, so
// they have come when it has ended. Where no plan waits that would be a loss: what is submitted after these words would
// get a plan of its own, which takes more hops than the one that is saved.
//
// A lane ends when one of its ranks leaves, and all of its ranks learn that in one round. All that is
// pending by then goes on in the lane of the world, where nothing is lost or done twice. So a lane may end at any time.
// It does
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
#include "runtime/mail.h"
#include "runtime/workplace.h"

namespace ringtrain {

class Lane final : public Workplace {
 public:
  // Hears of a lane: its Engine. With the turn; it does not wait, but in end().
  class Owner : public Executor::Sets, public Mail::Owner {
   public:
    // A round asks all ranks of the lane where their threads are.
    virtual void ask(const std::string& question) REQUIRES(turn) = 0;
    // Ranks have left the lane.
    virtual void has_ended(Lane& lane, const std::vector<int>& left) REQUIRES(turn) = 0;
    // In the lane of the world: all others are to end.
    virtual void end_lanes() REQUIRES(turn) = 0;
    virtual void found(const std::string& findings) = 0;  // of autotune
    // The thread is about to let several submissions come, which may take long.
    virtual void is_about_to_pause() = 0;
  };
  // The parts of an Engine that all its lanes work with. All outlive them.
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
    Mail& mail;
    Attention& attention;
    const World& world;
    const bool shares_cores;  // with other threads of this node's ranks
  };

  // `autotune`: rank 0's, in the lane of the world; else null.
  Lane(std::shared_ptr<OpenSet> set, const Shared& shared, std::unique_ptr<Autotune> autotune = nullptr);

  int process_set() const { return process_set_; }
  const std::vector<int>& members() const { return set_->membership->ranks(process_set_); }
  // Whether it is that of a process set whose ranks are all on this node.
  bool is_on_node() const { return process_set_ != 0 && !line_.is_over_network; }

  // ---- any thread
  Arrivals& arrivals() { return arrivals_; }
  bool callers_work() const override { return line_.channel->keeps_deadlines(); }
  void answer(const std::string& whereabouts);  // if it was asked
  Coordinator::Counts counts() const { return coordinator_.counts(); }
  // The next round says that this rank leaves.
  void leave();

  // ---- a thread on the lookout
  bool has_new() const override { return arrivals_.has_new(); }
  void gather() override;

  // ---- with the turn
  // Goes through rounds until all ranks of the lane have left. By a thread that is not busy with it.
  void drain(Watch& watch) REQUIRES(turn);
  // Carries out what was agreed on, when no more rounds come.
  void carry_out_rest() REQUIRES(turn);
  // When it has ended: what it has not agreed on.
  std::vector<Fresh> take_pending() REQUIRES(turn);
  // From a lane that has ended; before what is new.
  void take_in(std::vector<Fresh> pending) REQUIRES(turn);

 private:
  void let_burst_pass();

  void look_after_others() override REQUIRES(turn);
  bool is_looked_after() const override REQUIRES(turn) { return process_set_ == 0; }  // for all lanes
  double take_turn(double deadline, double now) override REQUIRES(turn);
  bool has_work() override REQUIRES(turn);
  bool is_stuck() const override REQUIRES(turn) { return coordinator_.is_in_round() && line_.channel->is_stuck(); }
  void be_called() override REQUIRES(turn) { line_.channel->be_called(); }
  void call_late() override REQUIRES(turn) {
    if (is_stuck()) line_.channel->call_late();
  }
  bool have_others_come() const override { return !has_ended_ && line_.channel->have_others_come(); }
  bool is_left_with_work() override REQUIRES(turn);
  bool is_called_by_others() override { return !has_ended_ && line_.channel->is_called(); }
  double next_deadline() override REQUIRES(turn) { return coordinator_.next_deadline(); }
  double pause_s() override REQUIRES(turn);
  void fail(const Error& error) override REQUIRES(turn) { shared_.owner.fail(error); }
  // That no other rank asks for.
  bool has_own_work() REQUIRES(turn);
  // Whether another rank calls, or none can any more, which the next turn throws.
  bool is_called() REQUIRES(turn);
  bool may_leave() REQUIRES(turn);
  // With what is new. `blockage`: as Coordinator::News.
  void begin_round(uint64_t blockage, double now) REQUIRES(turn);
  // Called again and again at the end of a plan.
  void begin_next_round() REQUIRES(turn);
  // The clock is read when a round begins, when it is agreed and when a plan has ended: `now` is the last time.
  void enqueue(const Round& round, double now) REQUIRES(turn);
  // `values`: as for Executor::run. When it ended.
  double run_agreed(const Backlog::Agreed& agreed, const Round::Values& values, double now) REQUIRES(turn);
  // The same where another round comes, which begins meanwhile if more plans wait and the link is long.
  double run_between_rounds(const Backlog::Agreed& agreed, const Round::Values& values, double now) REQUIRES(turn);
  double run(const Plan& plan, double agreed_s, double now, const Round::Values& values) REQUIRES(turn);
  void observe(const Plan& plan, double seconds) REQUIRES(turn);
  std::string take_answer();

  const std::shared_ptr<OpenSet> set_;
  const int process_set_;
  Line& line_;
  const Shared shared_;
  const bool is_link_long_;
  const std::function<void()> next_round_ = [this] {
    turn.assert_held();
    begin_next_round();
  };

  // Any thread.
  Arrivals arrivals_;
  std::atomic<bool> is_leaving_{false};
  std::atomic<bool> is_asked_{false}, has_answer_{false};
  Mutex answer_mutex_;
  std::string answer_ GUARDED_BY(answer_mutex_);

  Tuning& tuning_ GUARDED_BY(turn);
  Coordinator coordinator_;
  Executor executor_ GUARDED_BY(turn);
  std::unique_ptr<Autotune> autotune_ GUARDED_BY(turn);
  Backlog backlog_ GUARDED_BY(turn);
  uint32_t rings_before_round_ GUARDED_BY(turn) = 0;  // of the bell; a rank rings for the next round after it
  double quiet_since_s_ GUARDED_BY(turn) = now_s();
  Coordinator::News news_ GUARDED_BY(turn) = {};  // of the last round begun; its memory is used again
  std::vector<Fresh> taken_in_ GUARDED_BY(turn);  // from lanes that have ended
};

}  // namespace ringtrain
