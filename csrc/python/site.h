// A place in the user's code from which operations are submitted.
#pragma once

#include <memory>
#include <string>

namespace ringtrain {

// Shared by the requests that come from there.
struct Site {
  std::shared_ptr<const std::string> text;
};

}  // namespace ringtrain
