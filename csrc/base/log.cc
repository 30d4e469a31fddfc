#include "base/log.h"

#include <atomic>
#include <cstdio>

namespace ringtrain {

namespace {

enum class Level { kInfo, kWarning, kError };
std::atomic<Level> least{Level::kInfo};

void say(Level level, const char* beginning, const std::string& message) {
  if (level < least) return;
  std::fprintf(stderr, "%s: %s\n", beginning, message.c_str());
  std::fflush(stderr);
}

}  // namespace

void warn(const std::string& message) { say(Level::kWarning, "ringtrain warning", message); }
void inform(const std::string& message) { say(Level::kInfo, "ringtrain", message); }

void set_log_level(const std::string& level) {
  least = level == "error" || level == "fatal" ? Level::kError : level == "warning" ? Level::kWarning : Level::kInfo;
}

}  // namespace ringtrain
