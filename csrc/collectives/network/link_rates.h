// How fast the links of the hosts are: measured when a job begins.
#pragma once

#include <vector>

#include "base/options.h"
#include "collectives/network/shares.h"
#include "network/endpoint.h"

namespace ringtrain {

// `peers`: a rank of each host, which call this at the same time; more than one. The rate of a host is that of the
// faster of its links from and to its neighbours. Nothing where all of them are at least half as fast as the fastest.
// Takes half a second where the slowest link has 100 Mbit/s or more, and a good second at 10 Mbit/s.
LinkRates measure_link_rates(Endpoint peers, const Tuning& tuning);

}  // namespace ringtrain
