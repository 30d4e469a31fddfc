// Signals that announce the end of this process: their handler notes the time and nothing else.
//
// A handler in Python would run once the main thread is back in Python, and so would be late where it computes.
#pragma once

#include <map>

namespace ringtrain {

// Returns whether `number` has no handler and is not ignored, also by what Python does not know of, as faulthandler.
bool has_default_action(int number);
// Installs the handler for `number`, unless the signal is ignored or is noted already. `runs_former`: the handler of
// before, if there is one, runs as well.
//
// A forked child has the handler too. There a signal of its parent, or of the child itself, does what it did before;
// one that somebody sends to all processes of a job is left to the parent, as long as that lives.
void note_signal(int number, bool runs_former);
// Installs the handlers of before. The times of signals stay.
void stop_noting_signals();
// Returns the first time that each signal has come, in seconds of CLOCK_MONOTONIC; none that has not come.
std::map<int, double> noted_signals();

}  // namespace ringtrain
