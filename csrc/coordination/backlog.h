// The plans that were agreed on and are not carried out yet.
//
// After each round every rank carries out one, the most urgent, so all of them in one order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "coordination/plan.h"

namespace ringtrain {

class Backlog {
 public:
  struct Agreed {
    PlanPtr plan;
    double since_s;
  };

  // Behind those that are as urgent.
  void add(Agreed agreed) {
    const int32_t priority = agreed.plan->priority();
    places_.push_back({priority, next_++, std::move(agreed)});
    std::push_heap(places_.begin(), places_.end());
  }

  bool empty() const { return places_.empty(); }
  size_t size() const { return places_.size(); }

  // The most urgent; of those that are as urgent the one that was added first. There must be one.
  Agreed take() {
    std::pop_heap(places_.begin(), places_.end());
    Agreed first = std::move(places_.back().agreed);
    places_.pop_back();
    return first;
  }

 private:
  struct Place {
    int32_t priority;
    uint64_t number;
    Agreed agreed;

    bool operator<(const Place& other) const {
      return priority != other.priority ? priority < other.priority : number > other.number;
    }
  };

  std::vector<Place> places_;  // a heap
  uint64_t next_ = 0;
};

}  // namespace ringtrain
