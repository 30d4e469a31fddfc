// Bad news between ranks that share no memory: a rank that cannot go on, or hears that another one cannot, tells others
// once, and they hear of it while they wait.
//
// It tells all ranks that it is connected to. These would see its connection end when it leaves, and take it for the
// first that died: a connection delivers the message before its end. The negotiation has connected all ranks of a job,
// so each part of the job that dead ranks have cut off has a rank that sees one of them die, and hears nothing wrong.
//
// It also tells the ranks at a distance of 1, 2, 4, ... in the circle of the ranks, on both sides, whatever their
// number is: 2 log2(n) at most. Each can be reached by log2(n) of these messages, around stopped ranks and before the
// ranks have connected. Both sides of each pair tell each other, so neither waits for a connection to a rank that has
// heard already and answers nobody any more.
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
  // These ranks share memory with this one, in which they read why it fails, and their signs of life tell more than
  // answers: asks them no more, and makes no connections to tell them.
  void leave_out(const std::vector<int>& ranks);

 private:
  bool is_neighbour(int rank) const;
  void tell(const Bytes& message) noexcept;
  bool send(int rank, const Bytes& message) noexcept;
  void hear(int sender, const Bytes& message);

  Endpoint all_;
  const std::vector<RankName> names_;
  std::vector<int> others_;          // that share no memory with this one, in the circle of the ranks, from it on
  std::vector<double> asked_since_;  // by rank: the time of the question that it has not answered; 0: none
  double next_question_s_ = 0;
  bool has_heard_ = false;
};

}  // namespace ringtrain
