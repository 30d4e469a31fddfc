#include "collectives/contest.h"

#include "base/clock.h"
#include "collectives/scratch.h"

namespace ringtrain {
namespace {

constexpr int kRounds = 3;
constexpr double kTooLong_s = 10e-3;

// The longest of all ranks.
double seconds_for(Group& group, char* data, size_t bytes, Group& agreeing) {
  const double begin = now_s();
  group.allreduce({DType::uint8}, {{data, data, bytes}});
  double seconds = now_s() - begin;
  agreeing.allreduce({DType::float64, Reduce::max}, {{&seconds, &seconds, 1}});
  return seconds;
}

bool is_faster(Group& challenger, Group& champion, char* data, size_t bytes) {
  // The first time makes connections.
  for (Group* group : {&champion, &challenger}) {
    seconds_for(*group, data, bytes, champion);
    if (seconds_for(*group, data, bytes, champion) > kTooLong_s) return false;
  }
  double champion_s = 0, challenger_s = 0;
  for (int round = 0; round < kRounds; ++round) {
    champion_s += seconds_for(champion, data, bytes, champion);
    challenger_s += seconds_for(challenger, data, bytes, champion);
  }
  return challenger_s < 0.8 * champion_s;
}

}  // namespace

bool is_clearly_faster(Group& challenger, Group& champion, size_t bytes) {
  Scratch data;
  try {
    return is_faster(challenger, champion, data.get(bytes), bytes);
  } catch (...) {
    data.give_up();
    throw;
  }
}

}  // namespace ringtrain
