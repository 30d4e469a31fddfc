#include "base/exit_timer.h"

#include <unistd.h>

#include <chrono>
#include <utility>

#include "base/signals.h"

namespace ringtrain {

ExitTimer::ExitTimer(double seconds, std::string message) {
  start_thread([state = state_, seconds, message = std::move(message)] {
    const Lock lock(state->mutex);
    const auto is_cancelled = [&]() REQUIRES(state->mutex) { return state->is_cancelled; };
    if (state->has_changed.wait_for(state->mutex, std::chrono::duration<double>(seconds), is_cancelled)) return;
    const ssize_t written = write(STDERR_FILENO, message.data(), message.size());
    static_cast<void>(written);
    _exit(1);
  }).detach();
}

void ExitTimer::cancel() {
  const Lock lock(state_->mutex);
  state_->is_cancelled = true;
  state_->has_changed.notify_all();
}

}  // namespace ringtrain
