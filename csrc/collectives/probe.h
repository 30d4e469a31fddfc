// Which of two ways is faster here: tried when a Group is made.
#pragma once

#include <algorithm>
#include <limits>

#include "base/clock.h"

namespace ringtrain {

// How long work() takes on the slowest rank: the best of a few times, after one that makes connections. All ranks at
// the same time. slowest(seconds) gives all ranks the largest of their numbers.
template <typename Work, typename Slowest>
double probe_s(Work work, Slowest slowest) {
  constexpr int kTimes = 3;
  double best_s = std::numeric_limits<double>::infinity();
  work();
  for (int time = 0; time < kTimes; ++time) {
    const double begin = now_s();
    work();
    best_s = std::min(best_s, now_s() - begin);
  }
  return slowest(best_s);
}

}  // namespace ringtrain
