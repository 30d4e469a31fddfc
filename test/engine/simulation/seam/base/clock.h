// Takes the place of csrc/base/clock.h in simulated negotiation: time passes only when a test says so.
#pragma once

#include <atomic>

namespace ringtrain {

inline std::atomic<double> simulated_now_s{1};
// How long the plans have taken that the rank of this thread has carried out in this round.
inline thread_local double own_plans_s = 0;

inline double now_s() { return simulated_now_s + own_plans_s; }

}  // namespace ringtrain
