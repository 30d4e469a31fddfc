#include "python/stacks.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <sstream>

#include "base/signals.h"
#include "base/thread_annotations.h"
#include "base/wait.h"
#include "python/bind.h"

namespace ringtrain {
namespace {

// Of the thread of Python that keeps the GIL, before it is thought to keep it.
constexpr double kPatience_s = 0.3;

Mutex mutex;
std::optional<StackSignal> stack_signal GUARDED_BY(mutex);
Mutex asking_mutex;  // one thread asks at a time

// "in load() at train.py:17", of `  File "train.py", line 17 in load`.
std::string place_in(const std::string& line) {
  const std::string before_number = "\", line ", before_name = " in ";
  const size_t file = line.find('"') + 1, number = line.find(before_number), name = line.find(before_name, number);
  if (number == std::string::npos || name == std::string::npos) return "";
  const size_t digits = number + before_number.size();
  const std::string function = line.substr(name + before_name.size());
  std::string path = line.substr(file, number - file);
  std::unique_ptr<char, decltype(&std::free)> folder(getcwd(nullptr, 0), &std::free);
  if (const std::string below = folder ? folder.get() + std::string("/") : "/"; path.rfind(below, 0) == 0)
    path.erase(0, below.size());
  const std::string place = "at " + path + ":" + line.substr(digits, name - digits);
  return function == "<module>" ? place : "in " + function + "() " + place;
}

}  // namespace

void set_stack_signal(std::optional<StackSignal> signal) {
  const Lock lock(mutex);
  stack_signal = signal;
}

std::string dump_stacks() {
  const Lock lock(mutex);
  if (!stack_signal) return "";
  const auto [descriptor, number] = *stack_signal;
  if (ftruncate(descriptor, 0) != 0 || lseek(descriptor, 0, SEEK_SET) != 0) return "";
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, number);
  pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  pthread_kill(pthread_self(), number);
  pthread_sigmask(SIG_BLOCK, &only, nullptr);
  std::string text(static_cast<size_t>(lseek(descriptor, 0, SEEK_END)), ' ');
  const ssize_t size = pread(descriptor, text.data(), text.size(), 0);
  text.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return text;
}

// Another thread waits for the GIL, since nothing ends such a wait: only one does so at a time, and perhaps for long.
Stacks stacks_now() {
  struct Attempt {
    std::atomic<bool> is_late{false}, is_over{false};
    std::string text;
  };
  static std::atomic<bool> is_waiting{false};
  const Lock lock(asking_mutex);
  if (Waiter::comes_true([] { return !is_waiting.load(); }, kPatience_s)) {
    is_waiting = true;
    const auto attempt = std::make_shared<Attempt>();
    start_thread([attempt] {
      {
        const TakenGil gil;
        if (!attempt->is_late) attempt->text = dump_stacks();
      }
      attempt->is_over = true;
      is_waiting = false;
    }).detach();
    if (Waiter::comes_true([&] { return attempt->is_over.load(); }, kPatience_s)) return {attempt->text, false};
    attempt->is_late = true;
  }
  return {dump_stacks(), true};
}

// faulthandler writes the main thread last.
std::string whereabouts_in(const std::string& stacks) {
  const auto is_of_library = [](const std::string& line) {
    for (const char* part : {"/site-packages/", "/lib/python3", "/ringtrain/", "\"<"})
      if (line.find(part) != std::string::npos) return true;
    return false;
  };
  std::istringstream lines(stacks);
  std::string innermost, of_script;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("(most recent call first)") != std::string::npos) innermost = of_script = "";
    if (line.rfind("  File ", 0) != 0) continue;
    if (innermost.empty()) innermost = place_in(line);
    if (of_script.empty() && !is_of_library(line)) of_script = place_in(line);
  }
  return of_script.empty() ? innermost : of_script;
}

}  // namespace ringtrain
