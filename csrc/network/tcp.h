// Addresses, and connections of TCP before anything is said over them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"

namespace ringtrain {

struct SocketAddress {
  std::string host;  // numbers, of IPv4 or IPv6
  int port = 0;
};
std::string to_string(const SocketAddress& address);

// Small messages leave at once, and the kernel tells within the time that the other host is gone: by what is not
// acknowledged, or by probes while nothing is sent. 0: it waits for ever.
void prepare_socket(int socket, double timeout_s);

// A socket that does not block, and connects to `to` from the address `from` of this host where that is of its family.
// None where that has failed, and errno says why.
Descriptor begin_connection(const std::string& from, const SocketAddress& to, double timeout_s);

// The last that was heard from the other host's kernel, and whether it owes an answer to what was sent.
struct Answers {
  bool is_owed = false;
  double last_s_ago = 0;
};
Answers answers_on(int socket);

// Returns the text of errno.
std::string text_of(int error);

// Returns (interface, address) of this host's interfaces that are up, in the system's order: numbers of IPv4 and IPv6.
std::vector<std::pair<std::string, std::string>> interface_addresses();

}  // namespace ringtrain
