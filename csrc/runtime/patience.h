// How long an engine whose ranks are on several nodes waits for more submissions before it begins a round.
//
// A round over a network takes long, and so does an operation with a gradient or two. While nobody waits for a result
// it is better to let several come: the processor is left to who computes. As soon as a caller waits, nothing is held
// back.
#pragma once

#include <algorithm>
#include <atomic>

#include "base/clock.h"
#include "base/wait.h"

namespace ringtrain {

class Patience {
 public:
  // Any thread. While one of these lives, a caller waits for a result.
  class Hurry {
   public:
    explicit Hurry(Patience& patience) : patience_(patience) {
      patience_.in_a_hurry_.fetch_add(1, std::memory_order_seq_cst);
      patience_.hurry_.ring();
    }
    ~Hurry() { patience_.in_a_hurry_.fetch_sub(1, std::memory_order_relaxed); }
    Hurry(const Hurry&) = delete;
    Hurry& operator=(const Hurry&) = delete;

   private:
    Patience& patience_;
  };

  // The engine's thread, which alone takes turns over a network, from here on.
  bool is_hurried() const { return in_a_hurry_.load(std::memory_order_seq_cst) > 0; }
  // How long a round has taken. The quickest ones count: others have waited for a rank that was late.
  void note_round(double seconds) { quickest_round_s_ = std::min(seconds, 1.05 * quickest_round_s_); }
  void let_several_come() {
    constexpr double kRounds = 16, kLongest_s = 10e-3;
    const double end = now_s() + std::min(kRounds * quickest_round_s_, kLongest_s);
    for (double now = now_s(); now < end; now = now_s()) {
      const uint32_t seen = hurry_.value.load(std::memory_order_acquire);
      if (is_hurried()) return;
      hurry_.sleep(seen, end - now);
    }
  }

 private:
  std::atomic<int> in_a_hurry_{0};
  Flag hurry_;
  double quickest_round_s_ = 1;
};

}  // namespace ringtrain
