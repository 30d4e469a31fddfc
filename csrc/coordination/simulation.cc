#include "coordination/simulation.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <thread>

#include "base/clock.h"

namespace ringtrain {

Simulation::Rank::Rank(MemoryWire& wire, int size, const Coordinator::Limits& limits)
    : channel(wire, std::numeric_limits<double>::infinity()),
      membership(size),
      coordinator(channel, membership, limits) {}

Simulation::Simulation(int size, const Coordinator::Limits& limits) : wires_(MemoryWire::make(size)) {
  for (const auto& wire : wires_) ranks_.push_back(std::make_unique<Rank>(*wire, size, limits));
}

std::vector<Round> Simulation::round(const std::vector<std::vector<RequestPtr>>& fresh) {
  std::vector<Round> rounds(ranks_.size());
  std::vector<std::exception_ptr> errors(ranks_.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks_.size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        Coordinator& coordinator = ranks_[rank]->coordinator;
        coordinator.begin_round(fresh[rank], false);
        rounds[rank] = *coordinator.finish_round(std::numeric_limits<double>::infinity());
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  return rounds;
}

bool Simulation::is_due() const {
  const double now = now_s();
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [&](const auto& rank) { return rank->coordinator.next_deadline() <= now; });
}

size_t Simulation::most_messages() const {
  size_t most = 0;
  for (const auto& wire : wires_) most = std::max(most, wire->messages_handled());
  return most;
}

}  // namespace ringtrain
