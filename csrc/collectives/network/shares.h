// The part of an array that each rank owns in a ring or an exchange between hosts with unequal links.
//
// In a ring the link from rank i to the next one carries all slices but that of i in the reduce-scatter, and all but
// that of i + 1 in the allgather. So a slow host has less to send and to receive if it owns more: between one and two
// times the array, where equal slices take 2 (n - 1) / n times. In an exchange (exchange.cc) rank i sends, and
// receives, all slices but its own once, and its own n - 1 times: there a slow host owns less.
//
// The slices must be the same on all ranks, also on other processors, so all of this is computed in integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

// kbit/s of the link of each rank's host, in each direction; empty where they are alike or unknown.
using LinkRates = std::vector<uint64_t>;

class Shares {
 public:
  static Shares equal(size_t ranks) { return Shares(std::vector<uint64_t>(ranks)); }
  // The shares by which the busiest link, or host, has the least to do for its rate. Equal shares where others would
  // not save 5 percent of its time. `rates` are of at least two ranks, in the order of the ring.
  static Shares of_ring(const LinkRates& rates);
  static Shares of_exchange(const LinkRates& rates);

  bool are_equal() const { return parts_.back() == 0; }
  // `count` elements in a slice for each rank, which begins on a cache line. Equal shares are even_slices().
  Counts slices(size_t count) const;
  // Such as "0, 0, 100, 0 %".
  std::string text() const;

 private:
  // Of kWhole.
  explicit Shares(const std::vector<uint64_t>& parts);

  std::vector<uint64_t> parts_;  // of this rank and those before it; zeros where all are equal
};

}  // namespace ringtrain
