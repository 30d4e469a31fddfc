// Takes the place of csrc/kvstore/wire/dialler.h in the simulation of stores.
#pragma once

#include <memory>

#include "network/byte_stream.h"
#include "network/handshake.h"
#include "network/poller.h"
#include "network/tcp.h"

namespace ringtrain {

class Dialler final {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void dialled(ByteStream bytes) = 0;
    virtual void cannot_dial(int error) = 0;
  };

  Dialler(Poller& poller, Owner& owner, const Credentials& credentials)
      : poller_(poller), owner_(owner), credentials_(credentials) {}
  ~Dialler() { give_up(); }

  void dial(int to, const SocketAddress& address, double timeout_s);
  bool is_under_way() const { return attempt_ != nullptr; }
  void give_up() { attempt_.reset(); }

 private:
  Poller& poller_;
  Owner& owner_;
  const Credentials& credentials_;
  std::shared_ptr<int> attempt_;  // another one for each
};

}  // namespace ringtrain
