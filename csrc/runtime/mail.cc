#include "runtime/mail.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace {

constexpr double kShortest_s = 20e-6;  // between two looks at the Network
constexpr const char* kDoing = "a message between two ranks";

// On which this thread may run.
int own_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : CPU_SETSIZE;
}

// After how long a message is announced.
double ask_s(const Options& options) {
  Coordinator::Limits limits;
  limits.stall_warning_s = options.stall_warning_time_s;
  limits.stall_shutdown_s = options.stall_shutdown_time_s;
  return Coordinator::ask_s(limits);
}

}  // namespace

Mail::Mail(const World& world, const Options& options, Owner& owner, TurnMutex& turn, Fabric& fabric, Inbox& inbox,
           Blockage& blockage, BlockedThreads& blocked, Attention& attention)
    : Workplace(turn, fabric.bell(), fabric.message_bell(), watch_of_own_, attention),
      owner_(owner),
      fabric_(fabric),
      inbox_(inbox),
      blockage_(blockage),
      blocked_(blocked),
      watch_of_own_(fabric.watch().for_another_thread()),
      has_own_core_(world.cores >= world.ranks_on_own_node()),
      is_bound_(own_cores() * world.ranks_on_own_node() <= world.cores),
      messages_(world, ask_s(options), fabric, inbox) {
  watch_of_own_.now_doing(kDoing);
}

bool Mail::begin(const DirectEnds& ends) {
  if (!callers_work() || !begin_work()) return false;
  bool has_begun = false;
  guarded([&] {
    turn.assert_held();
    has_begun = !has_ended_ && !trouble_ && messages_.begin_directly(ends);
  });
  leave_directly();
  return has_begun;
}

void Mail::carry(const DirectEnds& ends) {
  if (ends.are_settled()) return;
  if (!begin_work()) return hand_over(ends);
  if (wakes_) stay_awake();
  guarded([&] {
    turn.assert_held();
    int looks = 0;
    const auto are_settled = [&] {
      turn.assert_held();
      constexpr int kLooksPerTurn = 16;
      messages_.listen_for(ends);
      if (ends.are_settled()) return true;
      if (++looks % kLooksPerTurn == 0 && messages_.has_work()) go_on(0);
      return false;
    };
    // The scheduler may have put the other rank on the same core, since the two wake each other.
    const auto let_other_run = [&] {
      turn.assert_held();
      if (messages_.may_share_core()) sched_yield();
    };
    const bool is_quick = has_own_core_ ? Waiter::comes_soon(are_settled, watch_, let_other_run)
                                        : direct_waiter_.is_quick(are_settled, &watch_);
    if (is_quick)
      blockage_.note_progress(now_s());
    else
      messages_.hand_over(ends);
  });
  leave_directly();
}

void Mail::hand_over(const DirectEnds& ends) NOT_ANALYSED {
  if (ends.are_settled()) return;
  const std::lock_guard lock(turn_);
  messages_.hand_over(ends);
}

// Where nothing else is under way nobody has to be woken for what is to be done next.
void Mail::leave_directly() {
  is_quiet_ = messages_.is_quiet();
  if (!is_quiet()) return let_go(false);
  end_work();
  waiting_callers_.call_next();
}

bool Mail::has_work() {
  if (has_ended_ || messages_.is_held()) return false;
  bool has_work = false;
  if (!trouble_)
    trouble_ = error_of([&] {
      turn.assert_held();
      has_work = messages_.has_work();
    });
  if (is_ending_for_others_) return true;
  return has_work || trouble_;
}

double Mail::take_turn(double, double now) {
  if (trouble_) throw *trouble_;
  fabric_.own_failure().require_none();
  return go_on(now);
}

// Words that end nothing here may have ended what looked like a deadlock.
double Mail::go_on(double now) {
  if (messages_.is_held()) return now;
  if (is_ending_for_others_.exchange(false)) messages_.refuse_others();
  if (!messages_.has_work()) return now;
  const size_t ended = messages_.work(now);
  worked_s_ = now = now_s();
  is_quiet_ = messages_.is_quiet();
  blockage_.note_progress(now);
  if (ended == 0) return now;
  blocked_.look();
  waiting_callers_.call_done();
  return now;
}

// Nobody waits in the middle of a message whose values are on their way, but somebody has to see that they stand still.
void Mail::look_after_others() {
  if (trouble_) throw *trouble_;
  const double waited_s = this->waited_s(now_s());
  if (waited_s > 0) return watch_.check(waited_s);
  watch_.now_doing(kDoing);
  watch_.look();
}

// Without what the rounds of the world look after: an end whose other end does not come.
double Mail::waited_s(double now) {
  const size_t before = std::exchange(carried_so_far_, messages_.carried_so_far());
  if (carried_so_far_ != before) worked_s_ = now;
  if (messages_.are_carried()) return now - worked_s_;
  return are_rounds_over_ ? now - messages_.waits_since_s(now) : 0;
}

double Mail::next_deadline() { return messages_.are_carried_by_network() ? now_s() + kShortest_s : kNever; }

void Mail::note_failure(const Agreement& agreement) {
  if (agreement.error != ErrorKind::deadlock) messages_.note_failure(agreement);
}

// Others need not ring for what is not waited for here.
void Mail::fall_asleep(Flag& bell) {
  is_quiet_ = messages_.is_quiet();
  if (is_quiet()) return let_new_ring();
  Workplace::fall_asleep(bell);
  messages_.let_others_ring(wakes_ == &bell_);
}

void Mail::stay_awake() {
  messages_.let_others_ring(false);
  Workplace::stay_awake();
}

// Ranks of this node ring, and those of others where the Network can.
double Mail::pause_s() {
  constexpr double kLongestPoll_s = 0.01, kSoon_s = 1e-3;
  if (messages_.are_carried_by_network()) return kShortest_s;
  if (is_quiet() || callers_work()) return kLookAround_s;
  const double idle_s = now_s() - worked_s_;
  if (idle_s > kSoon_s && fabric_.will_ring_on_arrival())
    return patience_.is_hurried() ? kLookAroundInWait_s : kLookAround_s;
  return std::clamp(idle_s / (patience_.is_hurried() ? 8 : 2), kShortest_s, kLongestPoll_s);
}

}  // namespace ringtrain
