// Takes the place of csrc/base/wait.h in the simulation of stores: who waits gives way to the other fibres.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/clock.h"
#include "fibres.h"

namespace ringtrain {

struct Flag {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  bool reached(uint32_t target) const { return static_cast<int32_t>(value.load() - target) >= 0; }
  void publish(uint32_t next) { value.store(next); }
  void ring() { value.fetch_add(1); }
  void sleep(uint32_t seen, double timeout_s) {
    auto& fibres = simulation::Fibres::current();
    fibres.wait([this, seen] { return value.load() != seen; }, fibres.now() + timeout_s);
  }
};

class Waiter {
 public:
  static void nap(double seconds) { simulation::Fibres::current().pause(std::max(seconds, 1e-3)); }
  template <typename Ready>
  bool is_quick(Ready ready) {
    return ready();
  }
};

// Between two looks at what somebody else is about to do.
inline void relax() { Waiter::nap(0); }
inline int sched_yield() {
  Waiter::nap(0);
  return 0;
}

}  // namespace ringtrain
