// How far apart two CPUs are just now: the time that a word takes from one process to another and back.
//
// Where virtual machines move, it is 50-90 ns while the two share a cache and some 500 ns while they do not, and the
// speed of everything in shared memory moves with it.
#pragma once

#include <atomic>
#include <cstdint>

namespace ringtrain {

// Memory that both processes have mapped, zeroed before each measurement.
struct RoundTripBoard {
  alignas(128) std::atomic<uint32_t> sent;
  alignas(128) std::atomic<uint32_t> returned;
};

// Called by the two processes at about the same time, by one with `begins`. Both spin, for `limit_s` at most. The
// smallest mean of several batches, which the scheduler has not disturbed; infinity if the other process did not come,
// and 0 in the process that does not begin.
double round_trip_ns(RoundTripBoard& board, bool begins, double limit_s);

}  // namespace ringtrain
