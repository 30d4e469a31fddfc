// Takes the place of csrc/network/tcp.h in the simulation of stores: an address is the port of a simulated server.
#pragma once

#include <string>

#include "base/descriptor.h"

namespace ringtrain {

struct SocketAddress {
  std::string host;
  int port = 0;
};
inline std::string to_string(const SocketAddress& address) { return address.host + ":" + std::to_string(address.port); }
std::string text_of(int error);

}  // namespace ringtrain
