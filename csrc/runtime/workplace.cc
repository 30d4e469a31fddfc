#include "runtime/workplace.h"

#include <algorithm>

#include "coordination/channel.h"
#include "kernels/reduce.h"

namespace ringtrain {

bool Workplace::begin_work() NOT_ANALYSED {
  if (!be_busy()) return false;
  turn_.lock();
  return true;
}

// Where callers work they may come meanwhile. Elsewhere one thread gathers, and others find it busy.
bool Workplace::gather_and_begin_work() NOT_ANALYSED {
  if (callers_work() && has_new()) gather();
  if (waiting_callers_.any() || !be_busy()) return false;
  if (!callers_work() && has_new()) gather();
  turn_.lock();
  return true;
}

void Workplace::end_work() NOT_ANALYSED {
  turn_.unlock();
  be_free();
}

// Where it is quiet the thread on the lookout may sleep without being counted.
void Workplace::ring_for_new() {
  if (has_rung_for_new_.exchange(true)) return;
  if (is_quiet())
    bell_.ring_all();
  else
    bell_.ring();
  callers_bell_.ring();
}

// -------------------------------------------------------------------------------------- the thread on the lookout

Workplace::Turns Workplace::take_turns(double longest_s) {
  if (!gather_and_begin_work()) return Turns::left_to_caller;
  stay_awake();
  Turns turns = Turns::none;
  guarded([&] {
    turn.assert_held();
    if (is_looked_after()) look_after_others();
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

bool Workplace::is_called_for() {
  if (is_quiet()) return false;
  if (callers_work()) return is_called_by_others();
  if (!begin_work()) return false;
  const bool has_work = this->has_work();
  end_work();
  return has_work;
}

std::optional<double> Workplace::lie_down() {
  if (!begin_work()) return kLookAround_s;  // who is busy here rings if something is left to do
  double pause_s = kLookAround_s;
  if (!has_ended_) {
    fall_asleep(bell_);
    pause_s = this->pause_s();
    is_dormant_ = callers_work() && !is_looked_after() && next_deadline() == kNever && pause_s == kLookAround_s;
  }
  const bool is_idle = !has_work();  // the lane of the world hears for all lanes, also when it has ended
  if (!is_idle) is_dormant_ = false;
  end_work();
  const bool is_left_to_caller = waiting_callers_.call_next();
  return is_idle || is_left_to_caller ? std::optional(pause_s) : std::nullopt;
}

// --------------------------------------------------------------------------------------------- the waiting callers

bool Workplace::wait(Handle& handle, Wait& wait) {
  if (!callers_work()) {
    const Patience::Hurry hurry(patience_);
    const bool is_done = handle.wait(wait.returns_s - wait.now);
    wait.now = now_s();
    return is_done;
  }
  do {
    if (begin_work() || wait_for_work(handle, wait)) work_until_done(handle, wait);
    attention_.end();
  } while (!has_waited_enough(handle, wait));
  return handle.is_done();
}

bool Workplace::has_waited_enough(const Handle& handle, const Wait& wait) const {
  return handle.is_done() || has_ended_ || wait.now >= wait.returns_s;
}

// The thread that is busy may finish the Handle, or leave it to this thread: at the latest after the next plan if it is
// the one on the lookout.
bool Workplace::wait_for_work(const Handle& handle, Wait& wait) {
  {
    WaitingCallers::Caller self(waiting_callers_, handle, nullptr);
    // The thread that is busy may have looked for work for the last time.
    bell_.ring();
    callers_bell_.ring();
    if (begin_work()) return true;
    self.sleep(std::clamp(wait.returns_s - wait.now, 0.0, kLookAround_s));
    wait.now = now_s();
  }
  return begin_work();
}

// While there is nothing to do it lets go. Then another caller may work, which has no reason to wait until this one is
// awake.
void Workplace::work_until_done(const Handle& handle, Wait& wait) {
  const KeptDenormals denormals;
  while (true) {
    stay_awake();
    begin_wait(wait);
    guarded([&] {
      turn.assert_held();
      work(handle, wait);
    });
    end_wait();
    if (has_waited_enough(handle, wait)) return let_go(false);
    if (wait.neighbours && wait.neighbours->need_help(*this)) {
      let_go(true);
      wait.neighbours->help(*this, wait);
      wait.now = now_s();
      if (!begin_work()) return;
      continue;
    }
    const uint32_t seen = callers_bell_.value.load(std::memory_order_acquire);
    fall_asleep(callers_bell_);
    if (is_stuck()) be_called();
    if (has_work() && !is_stuck()) continue;
    call_late();
    keep_bell(handle, wait, seen);
    if (!begin_work()) return;
    begin_wait(wait);
    guarded([&] {
      turn.assert_held();
      look_after_others();
    });
    end_wait();
  }
}

void Workplace::begin_wait(const Wait& wait) {
  watch_.set_interrupt(&wait.is_interrupted);
  watch_.set_deadline(wait.gives_up_s);
}

void Workplace::end_wait() {
  watch_.set_interrupt(nullptr);
  watch_.set_deadline(kNever);
}

// Until it is done or, with neighbours, until it needs others or they need help.
void Workplace::work(const Handle& handle, Wait& wait) {
  const double deadline = wait.neighbours ? Channel::kAtOnce : wait.returns_s;
  while (!has_waited_enough(handle, wait)) {
    if (wait.neighbours) attention_.begin();
    const bool has_work = this->has_work() && !is_stuck();
    if (!has_work && !work_comes(wait)) return;
    if (!has_work && wait.neighbours && wait.neighbours->need_help(*this)) return;
    wait.now = take_turn(deadline, wait.now);
  }
}

bool Workplace::work_comes(Wait& wait) {
  const auto has_come = [&] {
    turn.assert_held();
    return (has_work() && !is_stuck()) || (wait.neighbours && wait.neighbours->need_help(*this));
  };
  const bool is_quick =
      keeps_core() ? Waiter::comes_soon(has_come, watch_, [] {}) : waiter_.is_quick(has_come, &watch_);
  wait.now = now_s();
  return is_quick;
}

void Workplace::help(const Wait& wait) {
  if (waiting_callers_.any() || !begin_work()) return;
  stay_awake();
  begin_wait(wait);
  guarded([&] {
    turn.assert_held();
    for (double now = wait.now; !has_ended_ && have_others_come() && has_work();)
      now = take_turn(Channel::kAtOnce, now);
  });
  end_wait();
  let_go(true);
}

// Sleeps until the bell rings, which it has not since it was `seen`.
void Workplace::keep_bell(const Handle& handle, Wait& wait, uint32_t seen) {
  const double end = is_stuck() ? wait.returns_s : std::min(wait.returns_s, next_deadline());
  const double longest_s = is_stuck() ? watch_.interval_s(kLookAroundInWait_s) : kLookAroundInWait_s;
  const WaitingCallers::Caller self(waiting_callers_, handle, &callers_bell_);
  end_work();
  callers_bell_.sleep_uncounted(seen, std::clamp(end - now_s(), 0.0, longest_s));
  wait.now = now_s();
}

// A thread that stays attentive hears the bell when others have come to the round that is left, so the thread on the
// lookout may sleep on.
void Workplace::let_go(bool stays_attentive) {
  fall_asleep(bell_);
  if (stays_attentive && is_stuck()) be_called();
  const bool is_left_with_work = has_ended_ || (this->is_left_with_work() && !(stays_attentive && is_stuck()));
  end_work();
  if (!waiting_callers_.call_next() && is_left_with_work) bell_.ring();
}

// ------------------------------------------------------------------------------------------------------ sleep, the end

// Followed by a last look for work: a thread that did not ring, since another one had, has added its work before. A
// caller may have counted the thread on the lookout while it was awake.
void Workplace::fall_asleep(Flag& bell) {
  let_new_ring();
  if (wakes_ || has_ended_) return;
  bell.add_sleeper();
  wakes_ = &bell;
}

void Workplace::stay_awake() {
  if (is_dormant_) is_dormant_ = false;
  if (wakes_) wakes_->remove_sleeper();
  wakes_ = nullptr;
}

void Workplace::close() {
  stay_awake();
  waiting_callers_.call_all();
}

}  // namespace ringtrain
