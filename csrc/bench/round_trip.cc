#include "bench/round_trip.h"

#include <algorithm>
#include <limits>

#include "base/clock.h"

namespace ringtrain {
namespace {

constexpr int kBatches = 10, kTripsOfBatch = 200;
// Looking at the clock takes as long as a near trip.
constexpr int kLooksBetweenClocks = 4096;

// Whether ready() came true before the deadline.
template <typename Ready>
bool spin(Ready ready, double deadline) {
  for (int look = 1;; ++look) {
    if (ready()) return true;
    if (look % kLooksBetweenClocks == 0 && now_s() > deadline) return false;
  }
}

double send(RoundTripBoard& board, double deadline) {
  double shortest_s = std::numeric_limits<double>::infinity();
  uint32_t trip = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    const double begin = now_s();
    for (int i = 0; i < kTripsOfBatch; ++i) {
      board.sent.store(++trip, std::memory_order_release);
      if (!spin([&] { return board.returned.load(std::memory_order_acquire) == trip; }, deadline)) return shortest_s;
    }
    shortest_s = std::min(shortest_s, (now_s() - begin) / kTripsOfBatch);
  }
  return shortest_s;
}

void send_back(RoundTripBoard& board, double deadline) {
  for (uint32_t trip = 1; trip <= kBatches * kTripsOfBatch; ++trip) {
    if (!spin([&] { return board.sent.load(std::memory_order_acquire) >= trip; }, deadline)) return;
    board.returned.store(trip, std::memory_order_release);
  }
}

}  // namespace

double round_trip_ns(RoundTripBoard& board, bool begins, double limit_s) {
  const double deadline = now_s() + limit_s;
  if (begins) return 1e9 * send(board, deadline);
  send_back(board, deadline);
  return 0;
}

}  // namespace ringtrain
