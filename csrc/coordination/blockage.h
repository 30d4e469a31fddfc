// Whether this rank is blocked: every thread of it that could submit something waits, and nothing that was agreed on is
// left to be carried out. One for all Coordinators of a rank: a rank is blocked in all its lanes, or in none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/clock.h"
#include "base/thread_annotations.h"

namespace ringtrain {

class Blockage {
 public:
  // Any thread, one at a time. If nothing is carried out for a second, this rank comes to a round of the world to tell;
  // when all do so, everything that is pending fails.
  void say(bool is_blocked) {
    if (is_blocked != is_odd(count_)) ++count_;
  }
  // Any thread. Counts how often that has begun or ended; odd while it lasts.
  uint64_t count() const { return count_; }
  static bool is_odd(uint64_t count) { return count % 2 == 1; }

  void note_agreed(size_t plans) REQUIRES(turn) { plans_to_carry_out_ += plans; }
  // One of the plans that were agreed on is done.
  void note_carried_out(double now) REQUIRES(turn) {
    --plans_to_carry_out_;
    note_progress(now);
  }
  // Something has gone on that no round agrees on, which may lead to the end of a wait here.
  void note_progress(double now) REQUIRES(turn) {
    carried_out_s_ = now;
    told_ = 0;
  }

  // `count`, or 0 while no round may tell it. A thread whose Handle has just been finished may still be about to go on.
  uint64_t to_tell(uint64_t count, double now) REQUIRES(turn) {
    if (plans_to_carry_out_ != 0 || now - carried_out_s_ < kQuietBeforeDeadlock_s) return 0;
    if (is_odd(count)) told_ = count;
    return count;
  }
  // The same is to be told again.
  void forget_told() REQUIRES(turn) { told_ = 0; }
  // When to come to a round to tell, or infinity.
  double next_deadline() const REQUIRES(turn) {
    const uint64_t now = count();
    const bool will_tell = is_odd(now) && now != told_ && plans_to_carry_out_ == 0;
    return will_tell ? carried_out_s_ + kQuietBeforeDeadlock_s : std::numeric_limits<double>::infinity();
  }

 private:
  static constexpr double kQuietBeforeDeadlock_s = 1;

  std::atomic<uint64_t> count_{0};
  uint64_t told_ = 0;  // the last one of which all ranks have been told; 0: none since the last plan
  size_t plans_to_carry_out_ = 0;
  double carried_out_s_ = now_s();  // when the last plan was, or something else went on
};

}  // namespace ringtrain
