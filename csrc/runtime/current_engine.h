// The one Engine of this process, for every language that submits.
#pragma once

#include <memory>
#include <string>

#include "runtime/engine.h"

namespace ringtrain {

// Any thread. Null before init(), after shutdown() and in a forked child. Kept for the length of a call only: the
// thread that lets go of it last takes leave of the other ranks.
std::shared_ptr<Engine> current_engine();
// The same, but throws Error(not_initialized).
std::shared_ptr<Engine> require_engine();
// The result of the Autotune of an Engine of this process. Any thread.
std::string autotune_findings();

// Throws in a process that was forked from a rank. To be called before it meets the others: connections and MPI are
// still those of its parent.
void require_not_forked();
// All ranks of the world at the same time. Throws what made it impossible, as in a process that was forked from a rank.
void start_engine(World world, Options options);
// Leaves the job and ends the Engine, if there is one. Returns whether all was well until then. `by` is for the message
// of later calls: "shutdown() at train.py:40".
bool shut_down_engine(const std::string& by);

}  // namespace ringtrain
