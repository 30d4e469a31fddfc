#include "collectives/gpu/packing_contest.h"

#include <algorithm>

#include "base/clock.h"

namespace ringtrain {
namespace {

constexpr size_t kPieces = 16;
constexpr size_t kSizes[] = {16 << 10, 256 << 10};  // bytes of a piece, ascending
constexpr size_t kMany = size_t{1} << 40;
constexpr int kRounds = 2;

// Where the contest is held.
struct Venue {
  NcclGroup& group;
  const Gpu& gpu;
  Watch& watch;
  GpuBlockPtr block;
  std::shared_ptr<char> host;  // of one number
};

// Of the slowest rank, and so the same number on all of them.
double slowest(const Venue& at, double seconds) {
  auto* value = reinterpret_cast<double*>(at.host.get());
  *value = seconds;
  at.gpu.copy(at.block->data(), value, sizeof seconds, at.gpu.stream());
  at.group.allreduce({DType::float64, Reduce::max}, {{at.block->data(), at.block->data(), 1}});
  at.gpu.copy(value, at.block->data(), sizeof seconds, at.gpu.stream());
  at.gpu.wait(*at.gpu.record(at.gpu.stream()), at.watch);
  return *value;
}

double seconds_for(const Venue& at, size_t bytes, size_t pack_below) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < kPieces; ++i)
    pieces.push_back({at.block->data() + i * bytes, at.block->data() + i * bytes, bytes / sizeof(float)});
  at.group.pack_below(pack_below);
  double best = 0;
  for (int round = 0; round <= kRounds; ++round) {  // the first one makes connections
    const double begin = now_s();
    at.group.allreduce({DType::float32}, pieces);
    at.gpu.wait(*at.gpu.record(at.gpu.stream()), at.watch);
    const double seconds = now_s() - begin;
    if (round > 0) best = best == 0 ? seconds : std::min(best, seconds);
  }
  return slowest(at, best);
}

}  // namespace

void find_packing(NcclGroup& group, GpuPool& pool, Watch& watch) {
  if (group.size() == 1) return;  // nothing travels
  const Gpu& gpu = *group.comm().gpu();
  const Venue at{group, gpu, watch, pool.take(kPieces * kSizes[1]), gpu.pinned(sizeof(double))};
  at.gpu.clear(at.block->data(), kPieces * kSizes[1], at.gpu.stream());
  size_t pack_below = 0;
  for (const size_t bytes : kSizes)
    if (seconds_for(at, bytes, kMany) < seconds_for(at, bytes, 0)) pack_below = bytes + 1;
  group.pack_below(pack_below);
}

}  // namespace ringtrain
