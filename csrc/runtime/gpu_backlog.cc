#include "runtime/gpu_backlog.h"

#include <cstdio>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace ringtrain {

void GpuBacklog::add(GpuEventPtr done, const std::string& title, uint64_t commands) {
  constexpr size_t kMany = 64;
  if (pending_.size() >= kMany) look();
  pending_.push_back({std::move(done), title, commands, now_s()});
  commands_ += commands;
}

// A stream takes about a thousand.
void GpuBacklog::make_room(const Gpu& gpu, Watch& watch) {
  constexpr uint64_t kMany = 400;
  if (commands_ > kMany) look();
  while (commands_ > kMany) {
    gpu.wait(*pending_.front().done, watch);
    look();
  }
}

void GpuBacklog::look() {
  while (!pending_.empty() && pending_.front().done->has_come()) {
    commands_ -= pending_.front().commands;
    pending_.pop_front();
    has_warned_ = false;
    if (!pending_.empty()) pending_.front().since_s = now_s();  // it waited for the one before
  }
  if (pending_.empty()) return;
  const double waited_s = now_s() - pending_.front().since_s;
  if (limits_.stall_shutdown_s > 0 && waited_s > limits_.stall_shutdown_s)
    throw Error(ErrorKind::stalled, text(waited_s));
  if (limits_.stall_warning_s == 0 || waited_s < limits_.stall_warning_s || has_warned_) return;
  has_warned_ = true;
  warn(text(waited_s));
}

void GpuBacklog::fail(const Error& reason) {
  for (const Pending& pending : pending_)
    if (!pending.done->is_over()) pending.done->set_error(reason);
  pending_.clear();
  commands_ = 0;
}

std::string GpuBacklog::text(double waited_s) const {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.0f", waited_s);
  return pending_.front().title + " has been on the GPU for " + seconds +
         " s: all ranks have begun it, but one of them, or something that was put into its stream before, does not go "
         "on";
}

}  // namespace ringtrain
