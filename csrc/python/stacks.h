// The stacks of Python of all threads of this process, also while one of them keeps the GIL.
//
// faulthandler writes them: a signal for the thread that asks makes its handler do so, without the GIL. That is safe
// while no thread runs Python: the asking thread holds the GIL, or another one has kept it for a while, as inside a
// library written in C.
#pragma once

#include <optional>
#include <string>

namespace ringtrain {

// The signal that makes the handler of faulthandler write, and the descriptor to which it does.
struct StackSignal {
  int descriptor, number;
};
void set_stack_signal(std::optional<StackSignal> signal);

// Returns the text that the handler writes now; "" where there is none. The caller sees to it that no other thread runs
// Python.
std::string dump_stacks();

struct Stacks {
  std::string text;  // as faulthandler writes it
  bool is_gil_kept;  // for so long that they were taken without it
};
// Any thread that does not hold the GIL. Waits for the GIL for a moment only.
Stacks stacks_now();

// Of such a text: where the main thread is, in the innermost frame that is of the script: "in load() at train.py:17".
std::string whereabouts_in(const std::string& stacks);

}  // namespace ringtrain
