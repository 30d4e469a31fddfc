// A connection to a server that is being made.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "network/byte_stream.h"
#include "network/handshake.h"
#include "network/poller.h"
#include "network/tcp.h"

namespace ringtrain {

// On the thread of its Poller.
class Dialler final : public Watched {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    // Once, one of them. `error`: errno; 0: the other side has ended it.
    virtual void dialled(ByteStream bytes) = 0;
    virtual void cannot_dial(int error) = 0;
  };

  // All outlive this. `to`: the number of the wanted process, see Credentials.
  Dialler(Poller& poller, Owner& owner, const Credentials& credentials);
  ~Dialler() override;

  void dial(int to, const SocketAddress& address, double timeout_s);
  bool is_under_way() const { return handshake_.has_value(); }
  void give_up();

 private:
  void is_ready(uint32_t events) override;

  Poller& poller_;
  Owner& owner_;
  const Credentials& credentials_;
  std::optional<Handshake> handshake_;
};

}  // namespace ringtrain
