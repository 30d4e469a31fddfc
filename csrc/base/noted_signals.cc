#include "base/noted_signals.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>

namespace ringtrain {
namespace {

struct Noted {
  struct sigaction former;
  bool runs_former = false;
  std::atomic<bool> is_installed{false};
  std::atomic<int64_t> at_ns{0};
};

// Python calls note_signal and stop_noting_signals, under the GIL; the handler reads what they have written before.
std::array<Noted, NSIG> noted;
std::atomic<pid_t> owner{0};

void run(const struct sigaction& action, int number, siginfo_t* info, void* context) {
  if ((action.sa_flags & SA_SIGINFO) != 0)
    action.sa_sigaction(number, info, context);
  else if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN)
    action.sa_handler(number);
}

void handle_in_child(const struct sigaction& former, int number, pid_t sender) {
  const pid_t parent = getppid();
  if (parent == owner && sender != parent && sender != getpid()) return;
  sigaction(number, &former, nullptr);
  raise(number);  // comes when this handler returns
}

void on_signal(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  Noted& one = noted[number];
  if (getpid() != owner) {
    handle_in_child(one.former, number, info->si_pid);
  } else {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t never = 0;
    one.at_ns.compare_exchange_strong(never, now.tv_sec * 1'000'000'000LL + now.tv_nsec);
    if (one.runs_former) run(one.former, number, info, context);
  }
  errno = saved;
}

}  // namespace

bool has_default_action(int number) {
  struct sigaction action;
  return sigaction(number, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0 &&
         action.sa_handler == SIG_DFL;
}

void note_signal(int number, bool runs_former) {
  Noted& one = noted.at(number);
  struct sigaction action{};
  if (one.is_installed || sigaction(number, nullptr, &one.former) != 0) return;
  if ((one.former.sa_flags & SA_SIGINFO) == 0 && one.former.sa_handler == SIG_IGN) return;
  owner = getpid();
  one.runs_former = runs_former;
  action.sa_sigaction = &on_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  one.is_installed = sigaction(number, &action, nullptr) == 0;
}

void stop_noting_signals() {
  for (int number = 1; number < NSIG; ++number) {
    if (!noted[number].is_installed.exchange(false)) continue;
    struct sigaction current{};
    // a handler that the script has set later stays
    if (sigaction(number, nullptr, &current) == 0 && current.sa_sigaction == &on_signal)
      sigaction(number, &noted[number].former, nullptr);
  }
}

std::map<int, double> noted_signals() {
  std::map<int, double> found;
  for (int number = 1; number < NSIG; ++number)
    if (const int64_t at_ns = noted[number].at_ns; at_ns != 0) found[number] = static_cast<double>(at_ns) / 1e9;
  return found;
}

}  // namespace ringtrain
