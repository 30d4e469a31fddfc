// The plans that were agreed on and are not carried out yet.
//
// All ranks must carry out the plans of rounds of the world in one order, and the ranks of a node also those of rounds
// that ended on the node, or ranks would wait for each other in different plans. Rounds on a node come between those of
// the world on this node alone, so plans of the world are counted by rounds of the world: after each of them every rank
// carries out one, the most urgent. Plans of the node that are not less urgent go before it, and all others when there
// is no plan of the world. A round on the node begins only when no plan of the world is left.
#pragma once

#include <algorithm>
#include <deque>
#include <utility>

#include "coordination/channel.h"
#include "coordination/plan.h"

namespace ringtrain {

class Backlog {
 public:
  struct Agreed {
    PlanPtr plan;
    Reach reach;  // of the round that has agreed on it
    double since_s;
  };

  // Behind those that are as urgent.
  void add(Agreed agreed) {
    std::deque<Agreed>& queue = agreed.reach == Reach::world ? of_world_ : of_node_;
    const auto is_less_urgent = [](int32_t priority, const Agreed& one) { return one.plan->priority() < priority; };
    const auto place = std::upper_bound(queue.begin(), queue.end(), agreed.plan->priority(), is_less_urgent);
    queue.insert(place, std::move(agreed));
  }

  bool empty() const { return of_world_.empty() && of_node_.empty(); }
  bool has_plans_of_world() const { return !of_world_.empty(); }
  bool has_one_plan_of_world() const { return of_world_.size() == 1; }

  // Calls carry_out(agreed) for each plan whose turn comes after a round.
  template <typename CarryOut>
  void take_turn(Reach reach, CarryOut carry_out) {
    if (reach == Reach::node || of_world_.empty()) {
      if (!of_node_.empty()) carry_out(taken(of_node_));
      return;
    }
    const int32_t priority = of_world_.front().plan->priority();
    while (!of_node_.empty() && of_node_.front().plan->priority() >= priority) carry_out(taken(of_node_));
    carry_out(taken(of_world_));
  }

  // The same for all that are left, when no more rounds come; the last one was of the world.
  template <typename CarryOut>
  void take_rest(CarryOut carry_out) {
    while (!of_node_.empty()) carry_out(taken(of_node_));
    while (!of_world_.empty()) carry_out(taken(of_world_));
  }

 private:
  static Agreed taken(std::deque<Agreed>& queue) {
    Agreed first = std::move(queue.front());
    queue.pop_front();
    return first;
  }

  std::deque<Agreed> of_world_, of_node_;  // the most urgent first
};

}  // namespace ringtrain
