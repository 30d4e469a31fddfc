// The addresses of this host.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ringtrain {

// (interface, address) of those that are up, in the system's order: numbers of IPv4 and IPv6.
std::vector<std::pair<std::string, std::string>> interface_addresses();

}  // namespace ringtrain
