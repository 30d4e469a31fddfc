#include "base/log.h"

#include <cstdio>

namespace ringtrain {

void warn(const std::string& message) {
  std::fprintf(stderr, "ringtrain warning: %s\n", message.c_str());
  std::fflush(stderr);
}

}  // namespace ringtrain
