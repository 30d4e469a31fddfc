// Makes the connections between ranks: it dials, answers who dials, and hands over those that have proved who they are.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "network/handshake.h"
#include "network/poller.h"
#include "network/tcp.h"

namespace ringtrain {

// Addresses of every rank, and how to reach them.
struct Directory {
  std::vector<std::vector<SocketAddress>> addresses;
  int streams;       // connections to each rank
  double timeout_s;  // see prepare_socket()
};

class Connector {
 public:
  // Who gets the connections.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual bool is_connected(int rank) const = 0;
    // `dialler`: this rank or the other one.
    virtual void connected(int rank, int dialler, Descriptor socket) = 0;
    // For good. `details`: the address and the reason, for a message.
    virtual void is_out_of_reach(int rank, const std::string& details) = 0;
  };

  // All outlive this, and so do the listeners' sockets, which do not block.
  Connector(Poller& poller, Owner& owner, const Credentials& credentials, Directory directory,
            const std::vector<int>& listeners);
  ~Connector();

  // Dials a rank, unless that has been done before.
  void dial(int rank);
  // Leaves it to a rank that this one waits for to dial, for a moment.
  void want(int rank);
  // Does what is due by now.
  void look();

 private:
  class Listener;
  class Beginning;
  using Beginnings = std::list<std::unique_ptr<Beginning>>;

  struct Attempts {
    bool has_begun = false;
    int failed = 0;
    double wanted_at = 0;  // when to dial a rank that has not dialled; 0: nobody waits for it
  };

  void accept(int listener);
  bool refuse_one(int listener);
  void dial(int rank, int stream);
  const SocketAddress& address_of(int rank, int stream) const;
  void begin(Handshake handshake, int stream);
  void advance(Beginning& beginning);
  void end(Beginnings::iterator beginning);
  void end_oldest_stranger();

  Poller& poller_;
  Owner& owner_;
  const Credentials& credentials_;
  const Directory directory_;
  Descriptor spare_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::vector<Attempts> attempts_;  // by rank
  std::vector<int> wanted_;
  Beginnings beginnings_;
};

}  // namespace ringtrain
