// For the person at the terminal, one line each, on standard error.
#pragma once

#include <string>

namespace ringtrain {

void warn(const std::string& message);
void inform(const std::string& message);

}  // namespace ringtrain
