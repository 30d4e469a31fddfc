#include "collectives/network/contest.h"

#include <utility>

#include "base/clock.h"
#include "collectives/scratch.h"

namespace ringtrain {
namespace {

constexpr int kRounds = 3;
constexpr double kTooLong_s = 10e-3;

// All that MPI may still write to if it fails.
struct Contest {
  const std::shared_ptr<Group> challenger, champion;
  Scratch data;
  double seconds;
};

// The longest of all ranks.
double seconds_for(Group& group, Contest& contest, size_t bytes) {
  char* data = contest.data.get(bytes);
  const double begin = now_s();
  group.allreduce({DType::uint8}, {{data, data, bytes}});
  contest.seconds = now_s() - begin;
  contest.champion->allreduce({DType::float64, Reduce::max}, {{&contest.seconds, &contest.seconds, 1}});
  return contest.seconds;
}

}  // namespace

bool is_clearly_faster(std::shared_ptr<Group> challenger, std::shared_ptr<Group> champion, size_t bytes, Mpi& mpi) {
  const auto contest = std::make_shared<Contest>(Contest{std::move(challenger), std::move(champion), {}, 0});
  const Mpi::Lending lending(&mpi, contest);
  // The first time makes connections.
  for (Group* group : {contest->champion.get(), contest->challenger.get()}) {
    seconds_for(*group, *contest, bytes);
    if (seconds_for(*group, *contest, bytes) > kTooLong_s) return false;
  }
  double champion_s = 0, challenger_s = 0;
  for (int round = 0; round < kRounds; ++round) {
    champion_s += seconds_for(*contest->champion, *contest, bytes);
    challenger_s += seconds_for(*contest->challenger, *contest, bytes);
  }
  return challenger_s < 0.8 * champion_s;
}

}  // namespace ringtrain
