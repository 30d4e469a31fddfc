// Steps of the code in coordination/, which is compiled so that each basic block counts as one.
#pragma once

#include <cstdint>

namespace ringtrain {

// Counts in what the calling thread has done; before it ends.
void hand_in_steps();
// By all threads that have handed in, and this one.
uint64_t steps();

}  // namespace ringtrain
