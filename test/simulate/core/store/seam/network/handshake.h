// Takes the place of csrc/network/handshake.h in the simulation of stores, where nobody pretends to be somebody else.
#pragma once

#include <string>

namespace ringtrain {

struct Credentials {
  std::string secret, token;
  int rank, size;
  bool is_sealed = false;
};

}  // namespace ringtrain
