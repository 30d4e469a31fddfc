// A world of simulated ranks in one process, to try and to measure negotiation: real Coordinators and TreeChannels over
// wires in memory, one thread a rank.
#pragma once

#include <memory>
#include <vector>

#include "coordination/coordinator.h"
#include "coordination/memory_wire.h"
#include "coordination/tree_channel.h"

namespace ringtrain {

class Simulation {
 public:
  Simulation(int size, const Coordinator::Limits& limits);
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // One round on all ranks; `fresh`: what each becomes ready for. What each rank got.
  std::vector<Round> round(const std::vector<std::vector<RequestPtr>>& fresh);

  // Whether some rank would come to another round by itself.
  bool is_due() const;

  // Messages sent and received by the busiest rank so far.
  size_t most_messages() const;

 private:
  struct Rank {
    Rank(MemoryWire& wire, int size, const Coordinator::Limits& limits);
    TreeChannel channel;
    Membership membership;
    Coordinator coordinator;
  };

  std::vector<std::unique_ptr<MemoryWire>> wires_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace ringtrain
