#include "runtime/peer_watch.h"

#include <algorithm>

#include "base/clock.h"
#include "base/log.h"

namespace ringtrain {
namespace {

// In which somebody who waits hears of an interrupt.
constexpr double kLongestInterval_s = 0.02;
// A wait that lasts for less is no reason to give up: the others work, if slowly.
constexpr double kProgress_s = 1;

}  // namespace

void OwnFailure::set(const Error& reason) {
  const Lock lock(mutex_);
  if (is_set_) return;
  reason_.emplace(reason);
  is_set_.store(true, std::memory_order_release);
}

void PeerWatch::stop_listening_to(const NewsSource& source) {
  const auto is_it = [&](const Source& one) { return one.news == &source; };
  sources_.erase(std::remove_if(sources_.begin(), sources_.end(), is_it), sources_.end());
}

void PeerWatch::look() {
  own_failure_.require_none();
  for (Source& source : sources_) {
    const double pause_s = source.news->pause_s();
    if (pause_s > 0 && now_s() < source.next_s) continue;
    source.news->listen();
    if (pause_s > 0) source.next_s = now_s() + pause_s;
  }
}

double PeerWatch::interval_s(double waited_s) const {
  double interval_s = kLongestInterval_s;
  for (const Source& source : sources_) interval_s = std::min(interval_s, source.news->interval_s(waited_s));
  return interval_s;
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
  std::string stopped;
  for (const Source& source : sources_) stopped += source.news->who_is_stopped();
  text += stopped.empty() ? "some rank is stopped, or its host or network does not answer; " : stopped;
  return text + pending_();
}

void PeerWatch::check(double waited_s) {
  look();
  check_interrupt();
  const bool is_too_late = waited_s > kProgress_s && now_s() > deadline_s_;
  const bool is_over = is_too_late || (limits_.stall_shutdown_s > 0 && waited_s > limits_.stall_shutdown_s);
  if (!is_over && (has_warned_ || waited_s < limits_.stall_warning_s)) return;
  const std::string text = stall_text(waited_s);
  if (is_over) throw Error(ErrorKind::stalled, text);
  warn(text);
  has_warned_ = true;
}

}  // namespace ringtrain
