#include "runtime/lane.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/log.h"
#include "kernels/reduce.h"

namespace ringtrain {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// How long it does not look whether the others live: while nobody waits, and while somebody does.
constexpr double kLookAround_s = 0.2, kLookAroundInWait_s = 0.05;

Coordinator::Limits limits_of(const Options& options, const Tuning& tuning) {
  Coordinator::Limits limits;
  limits.cache_capacity = static_cast<size_t>(options.cache_capacity);
  limits.fusion_threshold_bytes = tuning.fusion_threshold_bytes;
  limits.stall_warning_s = options.stall_warning_time_s;
  limits.stall_shutdown_s = options.stall_shutdown_time_s;
  return limits;
}

bool is_deadlock(const Round& round) {
  return !round.plans.empty() && round.plans.front()->parts.front()->error == ErrorKind::deadlock;
}

}  // namespace

Lane::Lane(std::shared_ptr<OpenSet> set, const Shared& shared, std::unique_ptr<Autotune> autotune)
    : set_(std::move(set)),
      process_set_(set_->id),
      line_(*set_->line),
      shared_(shared),
      tuning_(*set_->tuning),
      coordinator_(*line_.channel, *set_->membership, shared.blockage, limits_of(shared.options, tuning_),
                   process_set_),
      executor_(shared.world.rank, *set_->membership, line_.watch, shared.inbox, shared.sets, shared.gpus, shared.owner,
                shared.residuals, process_set_ == 0 ? kTransferTag : lane_tag(process_set_) + kTransferTagOfLane),
      autotune_(std::move(autotune)) {}

void Lane::answer(const std::string& whereabouts) {
  if (!is_asked_.exchange(false)) return;
  {
    const Lock lock(answer_mutex_);
    answer_ = whereabouts;
  }
  has_answer_ = true;
}

std::string Lane::take_answer() {
  has_answer_ = false;
  const Lock lock(answer_mutex_);
  return std::exchange(answer_, {});
}

void Lane::leave() {
  is_leaving_.store(true);
  shared_.fabric.bell().ring();
}

bool Lane::begin_work() NOT_ANALYSED {
  if (!busy_.try_lock()) return false;
  shared_.turn.lock();
  return true;
}

void Lane::end_work() NOT_ANALYSED {
  shared_.turn.unlock();
  busy_.unlock();
}

// -------------------------------------------------------------------------------------- the thread on the lookout

void Lane::gather() {
  if (!callers_work()) {
    shared_.owner.is_about_to_pause();
    patience_.let_several_come();
  } else if (shared_.shares_cores) {
    let_burst_pass();
  }
}

// Where every core has a rank, turns in the middle of a burst of submissions (the gradients at the end of a backward
// pass) only keep the submitting thread from its work.
void Lane::let_burst_pass() {
  constexpr double kPause_s = 100e-6, kLongest_s = 500e-6;
  const double end = now_s() + kLongest_s;
  uint64_t added;
  do {
    added = shared_.inbox.added();
    Waiter::nap(kPause_s);
  } while (shared_.inbox.added() != added && now_s() < end && !waiting_callers_.any());
}

Lane::Turns Lane::take_turns(double longest_s) {
  if (waiting_callers_.any() || !begin_work()) return Turns::left_to_caller;
  stay_awake();
  Turns turns = Turns::none;
  guarded([&] {
    turn.assert_held();
    if (process_set_ == 0) look_after_others();  // for all lanes
    double now = now_s();
    for (const double end = now + longest_s; !has_ended_ && has_work() && !waiting_callers_.any();) {
      turns = now < end ? Turns::some : Turns::more_are_left;
      if (turns == Turns::more_are_left) break;
      now = take_turn(kNever, now);
    }
  });
  end_work();
  return waiting_callers_.call_next() ? Turns::left_to_caller : turns;
}

bool Lane::is_called_for() {
  if (callers_work()) return !has_ended_ && line_.channel->is_called();
  if (!begin_work()) return false;
  const bool has_work = this->has_work();
  end_work();
  return has_work;
}

std::optional<double> Lane::lie_down() {
  if (!begin_work()) return kLookAround_s;  // who is busy here rings if something is left to do
  double pause_s = kLookAround_s;
  bool is_idle = true;
  if (!has_ended_) {
    fall_asleep();
    pause_s = this->pause_s();
    is_idle = !has_work();
  }
  end_work();
  const bool is_left_to_caller = waiting_callers_.call_next();
  return is_idle || is_left_to_caller ? std::optional(pause_s) : std::nullopt;
}

// --------------------------------------------------------------------------------------------- the waiting callers

bool Lane::wait(Handle& handle, Wait& wait) {
  if (!callers_work()) {
    const Patience::Hurry hurry(patience_);
    const bool is_done = handle.wait(wait.returns_s - wait.now);
    wait.now = now_s();
    return is_done;
  }
  do {
    if (begin_work() || wait_for_work(handle, wait)) work_until_done(handle, wait);
  } while (!has_waited_enough(handle, wait));
  return handle.is_done();
}

bool Lane::has_waited_enough(const Handle& handle, const Wait& wait) const {
  return handle.is_done() || has_ended_ || wait.now >= wait.returns_s;
}

// The thread that is busy may finish the Handle, or leave it to this thread: at the latest after the next plan if it is
// the one on the lookout.
bool Lane::wait_for_work(const Handle& handle, Wait& wait) {
  {
    WaitingCallers::Caller self(waiting_callers_, handle, nullptr);
    shared_.fabric.bell().ring();  // the thread that is busy may have looked for work for the last time
    if (begin_work()) return true;
    self.sleep(std::clamp(wait.returns_s - wait.now, 0.0, kLookAround_s));
    wait.now = now_s();
  }
  return begin_work();
}

// While there is nothing to do it lets go. Then another caller may work, which has no reason to wait until this one is
// awake.
void Lane::work_until_done(const Handle& handle, Wait& wait) {
  const KeptDenormals denormals;
  PeerWatch& watch = line_.watch;
  const auto has_work = [&] {
    turn.assert_held();
    return this->has_work();
  };
  const auto work_comes = [&] {
    turn.assert_held();
    const bool has_come = waiter_.is_quick(has_work, &watch);
    wait.now = now_s();
    return has_come;
  };
  while (true) {
    stay_awake();
    watch.set_interrupt(&wait.is_interrupted);
    watch.set_deadline(wait.gives_up_s);
    guarded([&] {
      turn.assert_held();
      while (!has_waited_enough(handle, wait) && (has_work() || work_comes()))
        wait.now = take_turn(wait.returns_s, wait.now);
    });
    watch.set_interrupt(nullptr);
    watch.set_deadline(kNever);
    if (has_waited_enough(handle, wait)) return let_go();
    const uint32_t seen = shared_.fabric.bell().value.load(std::memory_order_acquire);
    fall_asleep();
    if (has_work()) continue;
    keep_bell(handle, wait, seen);
    if (!begin_work()) return;
    guarded([&] {
      turn.assert_held();
      look_after_others();
    });
  }
}

// Sleeps until the bell rings, which it has not since it was `seen`.
void Lane::keep_bell(const Handle& handle, Wait& wait, uint32_t seen) {
  const double end = std::min(wait.returns_s, coordinator_.next_deadline());
  const WaitingCallers::Caller self(waiting_callers_, handle, &shared_.fabric.bell());
  end_work();
  shared_.fabric.bell().sleep_uncounted(seen, std::clamp(end - now_s(), 0.0, kLookAroundInWait_s));
  wait.now = now_s();
}

// Ranks that have called, but have not rung since, are not in need yet: this thread may come back in a moment.
void Lane::let_go() {
  fall_asleep();
  const bool has_rung = shared_.fabric.bell().value.load(std::memory_order_seq_cst) != rings_before_round_;
  const bool is_left_with_work = has_ended_ || has_own_work() || (has_rung && is_called());
  end_work();
  if (!waiting_callers_.call_next() && is_left_with_work) shared_.fabric.bell().ring();
}

// ----------------------------------------------------------------------------------------------------------- the work

void Lane::look_after_others() {
  if (trouble_) throw *trouble_;
  line_.watch.look();
  shared_.gpus.look();
}

bool Lane::has_work() { return has_own_work() || is_called(); }

bool Lane::has_own_work() {
  if (has_ended_) return false;
  if (arrivals_.has_new() || !taken_in_.empty() || !backlog_.empty() || coordinator_.is_in_round() || is_leaving_ ||
      has_answer_)
    return true;
  const double deadline = coordinator_.next_deadline();
  return deadline != kNever && now_s() >= deadline;
}

bool Lane::is_called() {
  bool is_called = false;
  if (!trouble_)
    trouble_ = error_of([&] {
      if (process_set_ == 0) shared_.fabric.hear_calls();  // for all lanes
      is_called = !has_ended_ && line_.channel->is_called();
    });
  return is_called || trouble_;
}

// A round, unless the others do not come to it before `deadline`, and the plan whose turn comes then.
double Lane::take_turn(double deadline, double now) {
  if (trouble_) throw *trouble_;
  shared_.fabric.own_failure().require_none();
  if (!coordinator_.is_in_round()) {
    line_.watch.now_doing("the negotiation");
    news_.blockage = process_set_ == 0 ? shared_.blockage.count() : 0;
    news_.is_leaving = is_leaving_;
    news_.now = now;
    shared_.inbox.take_new(arrivals_, news_.fresh, now);
    if (!taken_in_.empty()) {
      news_.fresh.insert(news_.fresh.begin(), taken_in_.begin(), taken_in_.end());
      taken_in_.clear();
    }
    if (has_answer_) news_.whereabouts = take_answer();
    rings_before_round_ = shared_.fabric.bell().value.load(std::memory_order_acquire);
    coordinator_.begin_round(news_);
    news_.whereabouts.clear();
  }
  Round* const round = coordinator_.finish_round(deadline);
  now = now_s();
  if (!round) return now;
  patience_.note_round(now - news_.now);
  if (const auto timeline = shared_.inbox.has_timeline() ? shared_.inbox.timeline() : nullptr)
    timeline->note_round(now);
  if (round->tuning) tuning_ = *round->tuning;
  if (!round->question.empty()) {
    is_asked_ = true;
    shared_.owner.ask(round->question);
  }
  // Each rank has submitted another number of operations without a name by then, and all of them are about to fail.
  if (is_deadlock(*round)) shared_.inbox.restart_unnamed();
  enqueue(*round, now);
  // Values are valid until the next round, so only a plan that is carried out at once takes them.
  if (backlog_.size() != 1) round->values.clear();
  if (!backlog_.empty()) now = run_agreed(backlog_.take(), round->values, now);
  if (round->closes_lanes) shared_.owner.end_lanes();
  if (!round->left.empty()) {
    carry_out_rest();
    has_ended_ = true;
    shared_.owner.has_ended(*this, round->left);
  }
  waiting_callers_.call_done();
  quiet_since_s_ = now;
  return now;
}

// An error waits for no turn and for no other rank. It does not concern later submissions of the same name.
void Lane::enqueue(const Round& round, double now) {
  for (const PlanPtr& plan : round.plans) {
    if (plan->parts.front()->error != ErrorKind::none)
      run(*plan, now, now, {});
    else
      backlog_.add({plan, now});
  }
}

double Lane::run_agreed(const Backlog::Agreed& agreed, const std::vector<const void*>& values, double now) {
  const double end = run(*agreed.plan, agreed.since_s, now, values);
  if (autotune_) observe(*agreed.plan, end - now);
  return end;
}

double Lane::run(const Plan& plan, double agreed_s, double now, const std::vector<const void*>& values) {
  const double end = executor_.run(plan, agreed_s, now, values);
  shared_.blocked.look();
  shared_.blockage.note_carried_out(end);
  return end;
}

void Lane::observe(const Plan& plan, double seconds) {
  const Agreement& first = *plan.parts.front();
  if (first.operation.kind != OpKind::allreduce) return;
  if (first.operation.is_on_gpu) return;  // the time is that of the GPU, and nobody waits for it
  size_t bytes = 0;
  for (const AgreementPtr& part : plan.parts) bytes += part->operation.bytes();
  autotune_->note(bytes, seconds);
  if (const std::optional<Tuning> next = autotune_->take_proposal()) coordinator_.propose(*next);
  if (!autotune_->is_done()) return;
  inform(autotune_->report());
  shared_.owner.found(autotune_->findings());
  if (!shared_.options.autotune_file.empty()) autotune_->write(shared_.options.autotune_file);
  autotune_.reset();
}

// Followed by a last look for work: a thread that did not ring, since another one had, has added its work before. A
// caller may have counted the thread on the lookout while it was awake.
void Lane::fall_asleep() {
  if (has_rung_for_new_) has_rung_for_new_.exchange(false);
  if (is_counted_asleep_ || has_ended_) return;
  shared_.fabric.bell().add_sleeper();
  is_counted_asleep_ = true;
}

void Lane::stay_awake() {
  if (is_counted_asleep_) shared_.fabric.bell().remove_sleeper();
  is_counted_asleep_ = false;
}

// On one node it is enough to look whether the other ranks live. Other nodes may not be able to ring the bell, so the
// first rank of a node looks for their calls: often while there was work a moment ago, most often while a caller waits
// for them, rarely when idle. The others only give the Network a call now and then.
double Lane::pause_s() {
  constexpr double kShortest_s = 20e-6, kLongestCall_s = 0.1, kLongestPoll_s = 0.01, kSoon_s = 1e-3;
  const double idle_s = now_s() - quiet_since_s_;
  if (process_set_ != 0 && !line_.wire) return kLookAround_s;  // who calls rings
  if (!shared_.fabric.alarm() || (idle_s > kSoon_s && shared_.fabric.will_ring_on_arrival()))
    return std::clamp(coordinator_.next_deadline() - now_s(), kSoon_s,
                      patience_.is_hurried() ? kLookAroundInWait_s : kLookAround_s);
  return std::clamp(idle_s / (patience_.is_hurried() ? 8 : 2), kShortest_s,
                    process_set_ == 0 && shared_.fabric.is_rung_for_rounds() ? kLongestCall_s : kLongestPoll_s);
}

// -------------------------------------------------------------------------------------------------------- its end

void Lane::drain(Watch& watch) {
  leave();
  const auto has_ended = [&]() NOT_ANALYSED {
    const std::unique_lock busy(busy_, std::try_to_lock);
    while (busy && !has_ended_) take_turn(kNever, now_s());
    return has_ended_.load();
  };
  Waiter().poll(has_ended, &watch);
}

void Lane::carry_out_rest() {
  while (!backlog_.empty()) run_agreed(backlog_.take(), {}, now_s());
}

std::vector<Fresh> Lane::take_pending() {
  std::vector<Fresh> pending = coordinator_.take_pending(), fresh;
  shared_.inbox.take_new(arrivals_, fresh, now_s());
  pending.insert(pending.end(), fresh.begin(), fresh.end());
  return pending;
}

void Lane::take_in(std::vector<Fresh> pending) {
  taken_in_.insert(taken_in_.end(), pending.begin(), pending.end());
  ring_for_new();
}

void Lane::close() {
  stay_awake();
  waiting_callers_.call_all();
}

template <typename Work>
void Lane::guarded(Work work) {
  if (const std::optional<Error> error = error_of(work)) shared_.owner.fail(line_.watch.with_reason(*error));
}

}  // namespace ringtrain
