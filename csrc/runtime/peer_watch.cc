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
// A rank that can name no stopped rank waits for so much longer, to hear the error of a rank that can.
constexpr double kLetOthersSpeak_s = 1;

double or_never(double limit_s) { return limit_s > 0 ? limit_s : std::numeric_limits<double>::infinity(); }

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

Error PeerWatch::with_reason(const Error& error) {
  if (error.kind() != ErrorKind::peer_lost) return error;
  for (Source& source : sources_) source.next_s = 0;
  return error_of([&] { look(); }).value_or(error);
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

std::string PeerWatch::who_is_stopped(double waited_s) const {
  std::string stopped;
  for (const Source& source : sources_) stopped += source.news->who_is_stopped(waited_s);
  return stopped;
}

std::string PeerWatch::stall_text(double waited_s, const std::string& stopped) const {
  return "waiting for other ranks in " + doing_ + " for " + std::to_string(static_cast<int>(waited_s)) + " s: " +
         (stopped.empty()
              ? "some rank is stopped or still in another operation, or its host or network does not answer; "
              : stopped) +
         pending_();
}

void PeerWatch::check(double waited_s) {
  look();
  check_interrupt();
  const bool is_too_late = waited_s > kProgress_s && now_s() > deadline_s_;
  const double shutdown_s = or_never(limits_.stall_shutdown_s);
  const double warning_s = or_never(has_warned_ ? 0 : limits_.stall_warning_s);
  const double next_s = std::min(warning_s, shutdown_s);
  bool has_asked = false;
  if (waited_s > next_s / 2)
    for (const Source& source : sources_) has_asked |= source.news->ask(waited_s);
  if (!is_too_late && waited_s < next_s) return;
  const std::string stopped = who_is_stopped(waited_s);
  const double overdue_s = waited_s - (has_asked && stopped.empty() ? kLetOthersSpeak_s : 0);
  const bool is_over = is_too_late || overdue_s > shutdown_s;
  if (!is_over && overdue_s < warning_s) return;
  const std::string text = stall_text(waited_s, stopped);
  if (is_over) throw Error(ErrorKind::stalled, text);
  warn(text);
  has_warned_ = true;
}

}  // namespace ringtrain
