#include "base/log.h"

#include <cstdio>

namespace ringtrain {

namespace {

void say(const char* beginning, const std::string& message) {
  std::fprintf(stderr, "%s: %s\n", beginning, message.c_str());
  std::fflush(stderr);
}

}  // namespace

void warn(const std::string& message) { say("ringtrain warning", message); }
void inform(const std::string& message) { say("ringtrain", message); }

}  // namespace ringtrain
