// The steps of the optimizers of this process: how many there were, and how fast they come. Any thread.
#pragma once

#include <cstdint>

namespace ringtrain {

// The step of this number begins; 0: all are forgotten, as at init().
void note_step(int64_t count);

struct Steps {
  int64_t count = 0;
  double begun_s = 0;  // when the last one began, on the clock of base/clock.h; 0: there was none
  double per_s = 0;    // over the last 10 s, or the last two
};
Steps steps_until_now();

}  // namespace ringtrain
