// A world of simulated ranks in one process, to try and to measure negotiation: real Coordinators and Channels over
// wires in memory, one thread a rank.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordination/coordinator.h"
#include "memory_wire.h"

namespace ringtrain {

class Simulation {
 public:
  Simulation(int size, const Coordinator::Limits& limits);
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // A round in two halves: the ranks begin one after the other, then all of them end it. `fresh`: what one becomes
  // ready for. For so many seconds each plan keeps the ranks of its process set. Returns what each rank got.
  void begin(int rank, const std::vector<RequestPtr>& fresh);
  std::vector<Round> finish(double plan_s);

  // As Blockage::say.
  void say_blocked(int rank, bool is_blocked) { ranks_.at(rank)->blockage.say(is_blocked); }

  // The answer of a rank to Round::question, which its next round takes along.
  void answer(int rank, std::string whereabouts) { ranks_.at(rank)->whereabouts = std::move(whereabouts); }

  // The clock of all ranks goes on by so much. Else it stands still, however busy the machine is.
  static void pass_time(double seconds);

  // Whether some rank would come to another round by itself.
  bool is_due() const;

  const MemoryWire& wire(int rank) const { return *wires_.at(rank); }
  // How many rounds had the values of all ranks. Small allreduces have some.
  size_t came_with_values(int rank) const { return ranks_.at(rank)->coordinator.counts().came_with_values; }

 private:
  struct Rank {
    Rank(std::unique_ptr<Channel> channel, const Coordinator::Limits& limits);
    Round finish(double plan_s);

    const std::unique_ptr<Channel> channel;
    Membership membership;
    Blockage blockage;
    Coordinator coordinator;
    std::string whereabouts;
  };

  std::vector<std::unique_ptr<MemoryWire>> wires_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace ringtrain
