// The one Engine of this process, which bind_engine.cc owns; the GIL protects it. Who releases the GIL while he uses it
// keeps what he got here.
#pragma once

#include <memory>

#include "runtime/engine.h"

namespace ringtrain {

// Null before init(), after shutdown() and in a forked child.
std::shared_ptr<Engine> running_engine();
// Throws Error(not_initialized) instead.
std::shared_ptr<Engine> require_engine();

}  // namespace ringtrain
