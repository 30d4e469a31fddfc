// Takes the place of csrc/network/connector.h in the simulation of stores: takes the connections of a port.
#pragma once

#include <vector>

#include "base/descriptor.h"
#include "network/byte_stream.h"
#include "network/handshake.h"
#include "network/poller.h"
#include "network/tcp.h"

namespace ringtrain {

struct Directory {
  std::vector<std::vector<SocketAddress>> addresses;
  int streams;
  double timeout_s;
};

struct OutOfReach {};

class Connector {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual bool is_connected(int rank) const = 0;
    virtual void connected(int rank, int dialler, int stream, ByteStream bytes) = 0;
    virtual void is_out_of_reach(int rank, const OutOfReach& why) = 0;
  };

  // `listeners`: one port.
  Connector(Poller& poller, Owner& owner, const Credentials&, const Directory&, std::vector<Descriptor> listeners);
  ~Connector();

  void look() {}

 private:
  const int port_;
};

}  // namespace ringtrain
