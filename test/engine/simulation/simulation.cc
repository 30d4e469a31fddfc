#include "simulation.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <thread>

#include "base/clock.h"
#include "base/signals.h"
#include "coordination/tree_channel.h"
#include "steps.h"

namespace ringtrain {

Simulation::Rank::Rank(std::unique_ptr<Channel> own_channel, const Coordinator::Limits& limits)
    : channel(std::move(own_channel)),
      membership(channel->size()),
      coordinator(*channel, membership, blockage, limits) {}

Simulation::Simulation(int size, const Coordinator::Limits& limits) : wires_(MemoryWire::make(size)) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  for (const auto& wire : wires_)
    ranks_.push_back(std::make_unique<Rank>(std::make_unique<TreeChannel>(*wire, kNever), limits));
}

Round Simulation::Rank::finish(double plan_s) {
  turn.assert_held();  // nobody else works for this rank
  Round round = *coordinator.finish_round(std::numeric_limits<double>::infinity());
  for (const PlanPtr& plan : round.plans) {
    if (membership.contains(plan->parts.front()->operation.process_set, channel->rank())) own_plans_s += plan_s;
    blockage.note_carried_out(now_s());
  }
  return round;
}

void Simulation::begin(int rank, const std::vector<RequestPtr>& fresh) {
  turn.assert_held();
  Coordinator& coordinator = ranks_.at(rank)->coordinator;
  Coordinator::News news = {ranks_.at(rank)->blockage.count(), {}, false};
  news.whereabouts = std::exchange(ranks_.at(rank)->whereabouts, {});
  static const char value[Value::kMostBytes] = {};
  for (const RequestPtr& request : fresh) {
    const Operation& operation = request->operation;
    const bool is_small = operation.kind == OpKind::allreduce && operation.bytes() <= sizeof(value);
    news.fresh.push_back({request, is_small ? value : nullptr});
  }
  coordinator.begin_round(news);
}

std::vector<Round> Simulation::finish(double plan_s) {
  std::vector<Round> rounds(ranks_.size());
  std::vector<std::exception_ptr> errors(ranks_.size());
  std::vector<double> plans_s(ranks_.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks_.size(); ++rank)
    threads.push_back(start_thread([&, rank] {
      try {
        rounds[rank] = ranks_[rank]->finish(plan_s);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
      plans_s[rank] = own_plans_s;
      hand_in_steps();
    }));
  for (std::thread& thread : threads) thread.join();
  pass_time(*std::max_element(plans_s.begin(), plans_s.end()));
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
  return rounds;
}

void Simulation::pass_time(double seconds) { simulated_now_s = simulated_now_s + seconds; }

bool Simulation::is_due() const {
  const double now = now_s();
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
    turn.assert_held();
    return rank->coordinator.next_deadline() <= now;
  });
}

}  // namespace ringtrain
