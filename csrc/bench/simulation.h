// A world of simulated ranks in one process, to try and to measure negotiation: real Coordinators and Channels over
// wires in memory, one thread a rank.
#pragma once

#include <memory>
#include <vector>

#include "bench/memory_wire.h"
#include "coordination/coordinator.h"

namespace ringtrain {

class Simulation {
 public:
  Simulation(int size, const Coordinator::Limits& limits);
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // One round on all ranks; `fresh`: what each becomes ready for. What each rank got.
  std::vector<Round> round(const std::vector<std::vector<RequestPtr>>& fresh);
  // The same in two halves: the ranks begin one after the other, then all of them end it. For so many seconds each plan
  // keeps the ranks of its process set.
  void begin(int rank, const std::vector<RequestPtr>& fresh);
  std::vector<Round> finish(double plan_s);

  // As Coordinator::say_blocked.
  void say_blocked(int rank, bool is_blocked) { ranks_.at(rank)->coordinator.say_blocked(is_blocked); }

  // Whether some rank would come to another round by itself.
  bool is_due() const;

  // Messages sent and received so far, and their bytes, by rank.
  std::vector<size_t> messages_handled() const;
  std::vector<size_t> bytes_handled() const;

 private:
  struct Rank {
    Rank(std::unique_ptr<Channel> channel, const Coordinator::Limits& limits);
    Round finish(double plan_s);

    const std::unique_ptr<Channel> channel;
    Membership membership;
    Coordinator coordinator;
  };

  std::vector<std::unique_ptr<MemoryWire>> wires_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace ringtrain
