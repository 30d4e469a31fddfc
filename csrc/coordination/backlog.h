// The plans that were agreed on and are not carried out yet.
//
// All ranks must carry out the plans of rounds of the world in one order, and the ranks of a node also those of rounds
// that ended on the node, or ranks would wait for each other in different plans. Rounds on a node come between those of
// the world on this node alone, so plans of the world are counted by rounds of the world: after each of them every rank
// carries out one, the most urgent. Plans of the node that are not less urgent go before it, and all others when there
// is no plan of the world. A round on the node begins only when no plan of the world is left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

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
  void add(Agreed agreed) { (agreed.reach == Reach::world ? of_world_ : of_node_).add(std::move(agreed)); }

  bool empty() const { return of_world_.empty() && of_node_.empty(); }
  bool has_plans_of_world() const { return !of_world_.empty(); }
  bool has_one_plan_of_world() const { return of_world_.size() == 1; }

  // Calls carry_out(agreed) for each plan whose turn comes after a round.
  template <typename CarryOut>
  void take_turn(Reach reach, CarryOut carry_out) {
    if (reach == Reach::node || of_world_.empty()) {
      if (!of_node_.empty()) carry_out(of_node_.take());
      return;
    }
    const int32_t priority = of_world_.priority();
    while (!of_node_.empty() && of_node_.priority() >= priority) carry_out(of_node_.take());
    carry_out(of_world_.take());
  }

  // The same for all that are left, when no more rounds come; the last one was of the world.
  template <typename CarryOut>
  void take_rest(CarryOut carry_out) {
    while (!of_node_.empty()) carry_out(of_node_.take());
    while (!of_world_.empty()) carry_out(of_world_.take());
  }

 private:
  // A heap: the most urgent is first, and of those that are as urgent the one that was added first.
  class Queue {
   public:
    void add(Agreed agreed) {
      const int32_t priority = agreed.plan->priority();
      places_.push_back({priority, next_++, std::move(agreed)});
      std::push_heap(places_.begin(), places_.end());
    }
    Agreed take() {
      std::pop_heap(places_.begin(), places_.end());
      Agreed first = std::move(places_.back().agreed);
      places_.pop_back();
      return first;
    }
    bool empty() const { return places_.empty(); }
    size_t size() const { return places_.size(); }
    int32_t priority() const { return places_.front().priority; }

   private:
    struct Place {
      int32_t priority;
      uint64_t number;
      Agreed agreed;

      bool operator<(const Place& other) const {
        return priority != other.priority ? priority < other.priority : number > other.number;
      }
    };

    std::vector<Place> places_;
    uint64_t next_ = 0;
  };

  Queue of_world_, of_node_;
};

}  // namespace ringtrain
