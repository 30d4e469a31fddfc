#include "base/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace ringtrain {
namespace {

timespec to_timespec(double seconds) {
  const auto whole = static_cast<time_t>(seconds);
  return {whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void Flag::sleep(uint32_t seen, double timeout_s) {
  add_sleeper();
  sleep_uncounted(seen, timeout_s);
  remove_sleeper();
}

void Flag::sleep_uncounted(uint32_t seen, double timeout_s) {
  const timespec timeout = to_timespec(timeout_s);
  if (value.load(std::memory_order_seq_cst) == seen) futex(value, FUTEX_WAIT, seen, &timeout);
}

void Flag::ring_all() {
  value.fetch_add(1, std::memory_order_release);
  futex(value, FUTEX_WAKE, INT_MAX, nullptr);
}

void Flag::wake() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_relaxed) != 0) futex(value, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Waiter::wait_patiently(Flag& flag, uint32_t target, Watch* watch, const Period& period) {
  while (true) {
    const uint32_t seen = flag.value.load(std::memory_order_acquire);
    if (flag.reached(target)) return true;
    const double now = now_s();
    if (now >= period.deadline) return false;
    const double pause_s = watch ? watch->interval_s(now - period.begin) : kLookAround_s;
    {
      const Aside aside(watch);
      flag.sleep(seen, std::min(pause_s, period.deadline - now));
    }
    if (watch && !flag.reached(target)) watch->check(now_s() - period.begin);
  }
}

void Waiter::nap(double seconds) {
  const timespec time = to_timespec(std::clamp(seconds, kShortestNap_s, kLongestNap_s));
  nanosleep(&time, nullptr);
}

double Waiter::yield(double now) {
  constexpr double kSlow_s = 0.5e-3, kFast_s = 0.3e-3, kFirstPenalty_s = 0.05, kLongestPenalty_s = 2;
  sched_yield();
  const double end = now_s();
  if (end - now > kSlow_s) {
    yield_penalty_s_ = yield_penalty_s_ == 0 ? kFirstPenalty_s : std::min(2 * yield_penalty_s_, kLongestPenalty_s);
    no_yield_before_s_ = end + yield_penalty_s_;
  } else if (end - now < kFast_s) {
    yield_penalty_s_ -= yield_penalty_s_ / 64;
    if (yield_penalty_s_ < 1e-3) yield_penalty_s_ = 0;
  }
  return end;
}

}  // namespace ringtrain
