// TCP as a Network: no library between the ranks and the kernel, and nothing to poll while nothing comes.
//
// Two ranks are connected when one of them first sends to the other, or waits for it. Messages of a pair are numbered
// for each tag, so they may go over several connections, and a second one that both sides have opened at the same time
// does no harm. A rank keeps what it has sent until the other one confirms it. So a connection that breaks is made
// again by either side, or others carry on, and what was not confirmed is sent once more. Where no kernel acknowledges
// anything for half a second another connection is tried beside the silent one. A rank that refuses connections is
// gone; one that cannot be reached for `timeout_s` is lost. Everything happens in the calls of the Network; while
// nobody calls, the kernel keeps what comes, and descriptor() tells that it has.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/placement.h"
#include "network/network.h"
#include "network/tcp.h"

namespace ringtrain {

// The description of the ranks by ringtrain/job/sockets.py.
struct SocketDescription {
  std::vector<int> listeners;                         // of this rank; the Network owns them from now on
  std::vector<std::vector<SocketAddress>> addresses;  // of every rank: where its listeners are
  std::string secret;                                 // of the job
  std::string token;                                  // of its generation
  int streams = 1;                                    // connections to each rank
  double timeout_s = 10;                              // how long a rank may be out of reach; 0: for ever
  bool is_sealed = false;                             // see network/sealing.h
};

std::unique_ptr<Network> open_sockets(const SocketDescription& description, int rank,
                                      const std::vector<RankName>& names);

}  // namespace ringtrain
