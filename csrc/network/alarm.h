// Bad news between ranks that share no memory: a rank that cannot go on tells the others once, and they hear of it
// while they wait. In a large job it tells its neighbours in a hypercube, who tell theirs: so nobody needs a connection
// to everybody, and as many as each has neighbours must have died before one hears nothing.
#pragma once

#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/wait.h"
#include "network/endpoint.h"

namespace ringtrain {

// Requires Engine::turn_.
class Alarm final : public NewsSource {
 public:
  // `all`: the ranks of the world, without a Watch, since Watches ask this.
  explicit Alarm(Endpoint all) : all_(std::move(all)) {}

  // Tells the others, and gives the message a moment to leave. Does nothing if this rank has only heard it itself.
  void raise(ErrorKind kind, const std::string& message) noexcept;

  // Throws what another rank has raised. Lets the Network make progress too, which some libraries do only when they are
  // called: what this rank has sent before might not leave otherwise.
  void listen() override;
  double interval_s(double waited_s) const override;

 private:
  void tell(const Bytes& message) noexcept;

  Endpoint all_;
  bool has_heard_ = false;
};

}  // namespace ringtrain
