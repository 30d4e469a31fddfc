#include "runtime/lane.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace ringtrain {
namespace {

Coordinator::Limits limits_of(const Options& options, const Tuning& tuning) {
  Coordinator::Limits limits;
  limits.cache_capacity = static_cast<size_t>(options.cache_capacity);
  limits.fusion_threshold_bytes = tuning.fusion_threshold_bytes;
  limits.stall_warning_s = options.stall_warning_time_s;
  limits.stall_shutdown_s = options.stall_shutdown_time_s;
  return limits;
}

constexpr double kLongHop_us = 1000;

bool is_deadlock(const Round& round) {
  return !round.plans.empty() && round.plans.front()->parts.front()->error == ErrorKind::deadlock;
}

}  // namespace

Lane::Lane(std::shared_ptr<OpenSet> set, const Shared& shared, std::unique_ptr<Autotune> autotune)
    : Workplace(shared.turn, shared.fabric.bell(), shared.fabric.bell(), set->line->watch, shared.attention),
      set_(std::move(set)),
      process_set_(set_->id),
      line_(*set_->line),
      shared_(shared),
      is_link_long_(shared.options.link_hop_us >= kLongHop_us && line_.is_over_network && line_.channel->is_direct()),
      tuning_(*set_->tuning),
      coordinator_(*line_.channel, *set_->membership, shared.blockage, limits_of(shared.options, tuning_),
                   process_set_),
      executor_(shared.world.rank, *set_->membership, watch_, shared.inbox, shared.sets, shared.gpus, shared.owner,
                shared.residuals),
      autotune_(std::move(autotune)) {
  line_.channel->add_by(executor_);
  if (process_set_ == 0) coordinator_.ask_for(shared.mail.messages());
}

void Lane::answer(const std::string& whereabouts) {
  if (!is_asked_.exchange(false)) return;
  {
    const Lock lock(answer_mutex_);
    answer_ = whereabouts;
  }
  has_answer_ = true;
  rouse();
}

std::string Lane::take_answer() {
  has_answer_ = false;
  const Lock lock(answer_mutex_);
  return std::exchange(answer_, {});
}

void Lane::leave() {
  is_leaving_.store(true);
  rouse();
  bell_.ring();
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

// ----------------------------------------------------------------------------------------------------------- the work

void Lane::look_after_others() {
  if (trouble_) throw *trouble_;
  if (is_stuck())
    watch_.check(now_s() - news_.now);
  else
    watch_.look();
  shared_.gpus.look();
}

bool Lane::has_work() { return has_own_work() || is_called(); }

bool Lane::has_own_work() {
  if (has_ended_) return false;
  if (arrivals_.has_new() || !taken_in_.empty() || !backlog_.empty() || coordinator_.is_in_round() || has_answer_ ||
      may_leave())
    return true;
  const double deadline = coordinator_.next_deadline();
  return deadline != kNever && now_s() >= deadline;
}

// Others may still need what this rank has told them about messages that have ended here.
bool Lane::may_leave() {
  bool may_leave = is_leaving_;
  if (may_leave && process_set_ == 0 && !trouble_)
    trouble_ = error_of([&] {
      turn.assert_held();
      may_leave = shared_.mail.messages().are_all_told();
    });
  return may_leave;
}

// Ranks that have called, but have not rung since, are not in need yet: this thread may come back in a moment.
bool Lane::is_left_with_work() {
  const bool has_rung = bell_.value.load(std::memory_order_seq_cst) != rings_before_round_;
  return has_own_work() || (has_rung && is_called());
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
    watch_.now_doing("the negotiation");
    const uint64_t blockage = process_set_ == 0 ? shared_.blockage.count() : 0;
    if (Blockage::is_odd(blockage)) shared_.mail.go_on(now);  // what has come may be what this rank waits for
    begin_round(blockage, now);
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
  if (is_deadlock(*round)) {
    shared_.inbox.restart_unnamed();
    shared_.mail.messages().forget_waiting();
  }
  enqueue(*round, now);
  // Values are valid until the next round, so only a plan that is carried out at once takes them.
  if (backlog_.size() != 1) round->values.clear();
  if (round->closes_lanes) shared_.owner.end_lanes();
  if (!round->left.empty()) {
    carry_out_rest();
    has_ended_ = true;
    shared_.owner.has_ended(*this, round->left);
  } else if (!backlog_.empty()) {
    now = run_between_rounds(backlog_.take(), round->values, now);
  }
  waiting_callers_.call_done();
  quiet_since_s_ = now;
  return now;
}

void Lane::begin_round(uint64_t blockage, double now) {
  news_.blockage = blockage;
  news_.is_leaving = may_leave();
  news_.now = now;
  shared_.inbox.take_new(arrivals_, news_.fresh, now);
  if (!taken_in_.empty()) {
    news_.fresh.insert(news_.fresh.begin(), taken_in_.begin(), taken_in_.end());
    taken_in_.clear();
  }
  if (has_answer_) news_.whereabouts = take_answer();
  rings_before_round_ = bell_.value.load(std::memory_order_acquire);
  coordinator_.begin_round(news_);
  news_.whereabouts.clear();
}

void Lane::begin_next_round() {
  if (!coordinator_.is_in_round()) begin_round(0, now_s());
  line_.channel->go_on();
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

double Lane::run_agreed(const Backlog::Agreed& agreed, const Round::Values& values, double now) {
  const double end = run(*agreed.plan, agreed.since_s, now, values);
  if (autotune_) observe(*agreed.plan, end - now);
  return end;
}

double Lane::run_between_rounds(const Backlog::Agreed& agreed, const Round::Values& values, double now) {
  const PeerWatch::Meanwhile meanwhile(watch_, is_link_long_ && !backlog_.empty() ? &next_round_ : nullptr);
  const double end = run_agreed(agreed, values, now);
  if (coordinator_.is_in_round()) watch_.now_doing("the negotiation");
  return end;
}

double Lane::run(const Plan& plan, double agreed_s, double now, const Round::Values& values) {
  const Agreement& first = *plan.parts.front();
  const bool is_message = first.operation.kind == OpKind::transfer;  // that has failed
  if (is_message) shared_.mail.note_failure(first);
  const double end = executor_.run(plan, agreed_s, now, values);
  if (is_message) shared_.mail.call_done();
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
    if (!be_busy()) return has_ended_.load();
    const std::optional<Error> error = error_of([&]() NOT_ANALYSED {
      while (!has_ended_) take_turn(kNever, now_s());
    });
    be_free();
    if (error) throw *error;
    return true;
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

}  // namespace ringtrain
