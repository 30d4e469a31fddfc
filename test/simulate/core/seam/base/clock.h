// Takes the place of csrc/base/clock.h in simulations: the clock of the simulated rank whose code runs now.
#pragma once

namespace ringtrain {

double now_s();

}  // namespace ringtrain
