// What happens to a key of a store for a while, in the timeline of this process.
#pragma once

#include <string>

#include "base/clock.h"
#include "record/current_timeline.h"

namespace ringtrain {

// When something began that may be shown; 0 where nothing is.
inline double begin_of_stretch() { return may_have_timeline() ? now_s() : 0; }

// From its beginning until now. `what()` is its name. Stretches of one track do not overlap, or lie in each other.
template <typename What>
void note_stretch(double begin_s, const std::string& track, What what) {
  if (begin_s == 0) return;
  if (const auto timeline = current_timeline()) timeline->note({track, what(), begin_s, now_s()});
}

}  // namespace ringtrain
