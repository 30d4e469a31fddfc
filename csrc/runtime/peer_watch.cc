#include "runtime/peer_watch.h"

#include <algorithm>

#include "base/clock.h"
#include "base/log.h"

namespace ringtrain {
namespace {

constexpr double kRollCall_s = 0.02;

}  // namespace

void PeerWatch::give_up(const Error& reason) {
  const std::lock_guard lock(giving_up_);
  if (has_given_up_) return;
  reason_.emplace(reason);
  has_given_up_.store(true, std::memory_order_release);
}

void PeerWatch::look() {
  require_not_given_up();
  if (alarm_) alarm_->listen();
  if (!node_ || now_s() < next_roll_call_s_) return;
  node_->check_members();
  next_roll_call_s_ = now_s() + kRollCall_s;
}

// Over a network the pauses begin short and grow with the wait, since MPI moves on only when it is called.
double PeerWatch::interval_s(double waited_s) const {
  constexpr double kShortest_s = 50e-6, kLongest_s = 5e-3;
  return alarm_ ? std::clamp(waited_s / 8, kShortest_s, kLongest_s) : kRollCall_s;
}

// In the middle of an operation nobody can leave without taking the others with him, so an interrupt first gives it a
// moment to end by itself.
void PeerWatch::check_interrupt() {
  constexpr double kMoment_s = 1;
  if (interrupted_since_ == 0) {
    if (is_interrupted_ && (*is_interrupted_)()) interrupted_since_ = now_s();
  } else if (now_s() - interrupted_since_ > kMoment_s) {
    throw failure("interrupted while waiting for other ranks in " + doing_);
  }
}

std::string PeerWatch::stall_text(double waited_s) const {
  std::string text =
      "waiting for other ranks in " + doing_ + " for " + std::to_string(static_cast<int>(waited_s)) + " s: ";
  const std::vector<RankName> stopped = node_ ? node_->stopped_members() : std::vector<RankName>();
  for (const RankName& name : stopped) text += to_string(name) + " is stopped, by SIGSTOP or a debugger; ";
  if (stopped.empty()) text += "some rank is stopped, or its host or network does not answer; ";
  return text + pending_();
}

void PeerWatch::check(double waited_s) {
  look();
  check_interrupt();
  const bool is_over = limits_.stall_shutdown_s > 0 && waited_s > limits_.stall_shutdown_s;
  if (!is_over && (has_warned_ || waited_s < limits_.stall_warning_s)) return;
  const std::string text = stall_text(waited_s);
  if (is_over) throw Error(ErrorKind::stalled, text);
  warn(text);
  has_warned_ = true;
}

}  // namespace ringtrain
