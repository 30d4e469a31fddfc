// Lets messages between two ranks go on (pair_messages.h), beside the rounds of all lanes: the work for them never
// waits, so it goes on while a round waits for a rank that is late.
//
// They stand still only while a round of the world is settled, in which their ends may be announced.
#pragma once

#include <atomic>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "coordination/blockage.h"
#include "runtime/fabric.h"
#include "runtime/inbox.h"
#include "runtime/pair_messages.h"
#include "runtime/workplace.h"

namespace ringtrain {

class Mail final : public Workplace {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    // Nothing can go on.
    virtual void fail(const Error& error) REQUIRES(turn) = 0;
  };

  // All outlive this.
  Mail(const World& world, const Options& options, Owner& owner, TurnMutex& turn, Fabric& fabric, Inbox& inbox,
       Blockage& blockage, BlockedThreads& blocked, Attention& attention);

  PairMessages& messages() REQUIRES(turn) { return messages_; }
  // Any thread, with ends that it carries itself (direct_end.h). Returns whether they have begun; if not, they are to
  // be submitted.
  bool begin(const DirectEnds& ends);
  // Any thread, once they have begun. Carries them for a moment, and hands over those whose other end does not come.
  void carry(const DirectEnds& ends);
  // Any thread. They go on without it.
  void hand_over(const DirectEnds& ends);
  // Any thread with the turn, also while another one is busy here.
  double go_on(double now) REQUIRES(turn);
  // As PairMessages::note_failure(). call_done() is due when its Handle has failed.
  void note_failure(const Agreement& agreement) REQUIRES(turn);
  // No more rounds of the world come, in which an end that waits for long is announced.
  void note_end_of_rounds() REQUIRES(turn) { are_rounds_over_ = true; }
  // Any thread. This rank submits nothing more, which it has said to the negotiation.
  void end_for_others() {
    is_ending_for_others_ = true;
    bell_.ring_all();
    callers_bell_.ring();
  }

  // ---- of a Workplace
  bool callers_work() const override { return !messages_.is_over_network(); }
  bool has_new() const override { return inbox_.has_new_messages() || is_ending_for_others_; }
  bool is_quiet() const override { return is_quiet_ && !has_new(); }

 private:
  void look_after_others() override REQUIRES(turn);
  double take_turn(double deadline, double now) override REQUIRES(turn);
  bool has_work() override REQUIRES(turn);
  // Else the lane of the world does.
  bool is_looked_after() const override REQUIRES(turn) { return messages_.are_carried() || are_rounds_over_; }
  bool is_left_with_work() override REQUIRES(turn) { return has_work(); }
  bool is_called_by_others() override { return messages_.is_called_on_node(); }
  bool keeps_core() const override { return is_bound_; }
  double next_deadline() override REQUIRES(turn);
  double pause_s() override REQUIRES(turn);
  void fail(const Error& error) override REQUIRES(turn) { owner_.fail(error); }
  double waited_s(double now) REQUIRES(turn);
  void leave_directly() RELEASE(turn);
  void fall_asleep(Flag& bell) override REQUIRES(turn);
  void stay_awake() override REQUIRES(turn);

  Owner& owner_;
  Fabric& fabric_;
  Inbox& inbox_;
  Blockage& blockage_;
  BlockedThreads& blocked_;
  PeerWatch watch_of_own_;
  const bool has_own_core_;
  const bool is_bound_;  // to cores on which no other rank of the node runs
  PairMessages messages_;
  Waiter direct_waiter_ GUARDED_BY(turn);
  std::atomic<bool> is_ending_for_others_{false};
  std::atomic<bool> is_quiet_{true};  // as it was last seen with the turn
  double worked_s_ GUARDED_BY(turn) = now_s();
  size_t carried_so_far_ GUARDED_BY(turn) = 0;  // as it was last seen
  bool are_rounds_over_ GUARDED_BY(turn) = false;
};

}  // namespace ringtrain
