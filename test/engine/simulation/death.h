// A death in a large world: the real Alarm of each rank in turn, with the message that reaches it first, so that what
// the news cost can be measured for any number of ranks.
#pragma once

#include <cstddef>

namespace ringtrain {

// Of the busiest rank.
struct DeathCost {
  double seconds;          // of the processor
  size_t messages, bytes;  // received and sent
};

DeathCost cost_of_death(int size);

}  // namespace ringtrain
