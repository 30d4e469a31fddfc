#include "call.h"

#include <fcntl.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "settings.h"

namespace gpu_double {
namespace {

struct Calls {
  std::mutex mutex;
  std::string log_folder;  // empty: no log
  std::vector<PlannedFailure> failures = settings().failures;
  std::map<std::string, long> made;  // only of names for which a failure is planned
  std::string last_sentence;
};

Calls& calls() {
  static auto* const one = new Calls;
  return *one;
}

// Opened again for each line: a forked child writes to a file of its own.
int open_log() {
  const std::lock_guard<std::mutex> lock(calls().mutex);
  const std::string path = calls().log_folder + "/" + std::to_string(getpid());
  return open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
}

}  // namespace

bool Call::is_logging() {
  const std::lock_guard<std::mutex> lock(calls().mutex);
  return !calls().log_folder.empty();
}

void Call::write_line(const std::string& line) {
  const int file = open_log();
  if (file < 0) return;
  // One write for one line: threads do not tear lines apart.
  const ssize_t written = write(file, line.data(), line.size());
  static_cast<void>(written);
  close(file);
}

void Call::remember(const Refusal& refusal) {
  const std::lock_guard<std::mutex> lock(calls().mutex);
  calls().last_sentence = refusal.sentence;
}

std::string Call::last_sentence() {
  const std::lock_guard<std::mutex> lock(calls().mutex);
  return calls().last_sentence;
}

void Call::log_to(const std::string& folder) {
  const std::lock_guard<std::mutex> lock(calls().mutex);
  calls().log_folder = folder;
}

void Call::plan_failures(const std::string& plan) {
  const std::lock_guard<std::mutex> lock(calls().mutex);
  calls().failures = read_failures(plan);
  calls().made.clear();
}

void Call::refuse_where_planned() const {
  const std::lock_guard<std::mutex> lock(calls().mutex);
  long made = 0;
  for (const PlannedFailure& failure : calls().failures) {
    if (failure.call != name_) continue;
    if (made == 0) made = ++calls().made[name_];
    if (failure.nth == 0 || failure.nth == made) throw Refusal{failure.code, failure.call + " was told to fail"};
  }
}

}  // namespace gpu_double
