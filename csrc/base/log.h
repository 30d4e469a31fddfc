// For the person at the terminal, one line each, on standard error.
#pragma once

#include <string>

namespace ringtrain {

void warn(const std::string& message);
void inform(const std::string& message);

// From now on nothing below this level is said; `level` is a value of the option log_level. Any thread may call it.
void set_log_level(const std::string& level);

}  // namespace ringtrain
