// Bad news between ranks that share no memory: a rank that cannot go on tells the others once, and they hear of it
// while they wait. In a large job it tells its neighbours in a hypercube, who tell theirs: so nobody needs a connection
// to everybody, and as many as each has neighbours must have died before one hears nothing.
//
// A rank that has waited for long also asks others in the same way whether they still answer. Every rank answers in its
// waits, in long streams and while it is idle, so only a rank that is stopped or out of reach does not.
#pragma once

#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/placement.h"
#include "base/wait.h"
#include "network/endpoint.h"

namespace ringtrain {

// Requires Engine::turn_.
class Alarm final : public NewsSource {
 public:
  // `all`: the ranks of the world, without a Watch, since Watches ask this. `names`: of them all.
  Alarm(Endpoint all, std::vector<RankName> names);
  // Answers that have left need not be cancelled.
  ~Alarm() override { all_.drain(0); }

  // Tells the others, and gives the message a moment to leave. Does nothing if this rank has only heard it itself.
  void raise(ErrorKind kind, const std::string& message) noexcept;

  // Throws what another rank has raised. Lets the Network make progress too, which some libraries do only when they are
  // called: what this rank has sent before might not leave otherwise.
  void listen() override;
  double interval_s(double waited_s) const override;

  // Asks ranks that have answered the question before, at most once a second, and only where there is a connection: a
  // new one to a stopped rank would fail and end the job before its deadline. A rank that waits for another one has a
  // connection to it.
  bool ask(double waited_s) override;
  // Names the ranks that have not answered for a second. Questions of an earlier wait do not count, as its end may have
  // come before their answers.
  std::string who_is_stopped(double waited_s) const override;
  // Asks these ranks no more: their signs of life tell more.
  void leave_out(const std::vector<int>& ranks);

 private:
  void tell(const Bytes& message) noexcept;
  bool send(int rank, const Bytes& message) noexcept;
  void hear(int sender, const Bytes& message);

  Endpoint all_;
  const std::vector<RankName> names_;
  std::vector<int> to_ask_;          // in the circle of the ranks, from this one on
  std::vector<double> asked_since_;  // by rank: the time of the question that it has not answered; 0: none
  double next_question_s_ = 0;
  bool has_heard_ = false;
};

}  // namespace ringtrain
