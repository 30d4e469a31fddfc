// Waiting for a counter to advance or for a message to arrive, without burning the core that the others compute on.
//
// The policy: spin for up to 12 us, then yield the core for 0.1 ms, then sleep. How long it spins adapts: it
// shrinks by a quarter when spinning failed and grows by a sixteenth when it was not; every now and then it spins
// for long in any case. Where ranks share cores the yields let the awaited ones run. A yield that takes long means that
// somebody busy shares the core, so yields stop for a while, doubling up to two seconds. While it sleeps, a Watch is
// asked every few milliseconds whether waiting still makes sense.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>

#include "base/clock.h"

namespace ringtrain {

// A failure detector: every wait for other ranks asks it now and then whether waiting still makes sense.
class Watch {
 public:
  virtual ~Watch() = default;

  // Throws PeerLost, Stalled or what another rank failed with. `waited_s`: how long this wait has lasted.
  // Called by the thread that waits. The Watch of an Engine requires Engine::turn_.
  virtual void check(double waited_s) = 0;

  // How many seconds to sleep before the next call.
  virtual double interval_s(double waited_s) const = 0;

  // Whether another thread waits for the right to work that the thread that waits here has.
  virtual bool is_wanted() const { return false; }
  // Called again and again in a long operation from the moment when this rank has sent all that the others need of it.
  virtual void has_sent_all() {}
  // Called around each sleep: lets other threads have that right, and takes it back.
  virtual void step_aside() {}
  virtual void step_back() {}
};

// While one lives, its thread sleeps, and others may work.
class Aside {
 public:
  explicit Aside(Watch* watch) : watch_(watch) {
    if (watch_) watch_->step_aside();
  }
  ~Aside() {
    if (watch_) watch_->step_back();
  }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

 private:
  Watch* const watch_;
};

// Where a rank hears that others are dead or have failed, such as their signs of life, or messages.
class NewsSource {
 public:
  virtual ~NewsSource() = default;

  // Throws what it has heard.
  virtual void listen() = 0;
  // How long one need not listen again.
  virtual double pause_s() const { return 0; }
  // How many seconds a thread that has waited for so long sleeps before it looks again.
  virtual double interval_s(double waited_s) const = 0;
  // Called again and again while a wait lasts for long: asks others to show that they still answer. Returns whether
  // there are any to ask.
  virtual bool ask(double /*waited_s*/) { return false; }
  // The ranks that live and do not answer, for a message: "rank 3 (...) is stopped, by SIGSTOP or a debugger; ".
  virtual std::string who_is_stopped(double /*waited_s*/) const { return ""; }
};

// A sequence counter in memory that threads, also of several processes, wait on. One writer, or fetch_add.
// Counts modulo 2^32; comparisons are right as long as both sides are less than 2^31 apart. Where several are side by
// side each needs a cache line of its own: alignas(64).
struct Flag {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  bool reached(uint32_t target) const {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }
  void publish(uint32_t next) {
    value.store(next, std::memory_order_release);
    wake();
  }
  void ring() {
    value.fetch_add(1, std::memory_order_release);
    wake();
  }
  // As ring(), and wakes those who sleep uncounted as well.
  void ring_all();
  // Sleeps until the value differs from `seen`, a wake-up or `timeout_s`, whichever comes first.
  void sleep(uint32_t seen, double timeout_s);

  // The parts of sleep(), for a caller that keeps count itself of whether its thread has to be woken.
  void add_sleeper() { sleepers.fetch_add(1, std::memory_order_seq_cst); }
  void remove_sleeper() { sleepers.fetch_sub(1, std::memory_order_relaxed); }
  void sleep_uncounted(uint32_t seen, double timeout_s);

 private:
  void wake();
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How fast the parts of one stream come.
class Pace {
 public:
  explicit Pace(size_t parts) : left_(parts) {}

  void note(int came) {
    const double now = now_s();
    const double gap = (now - noted_s_) / came;
    gap_s_ = gap_s_ == 0 ? gap : gap_s_ + (gap - gap_s_) / 8;
    noted_s_ = now;
    left_ -= static_cast<size_t>(came);
  }
  // True once a second: a thread whose stream never pauses has to look around as well.
  bool is_look_due() {
    constexpr double kPause_s = 1;
    if (noted_s_ - looked_s_ < kPause_s) return false;
    looked_s_ = noted_s_;
    return true;
  }
  // 0 where they come fast, or too few are left.
  double until_several_s() const {
    constexpr double kSlow_s = 50e-6;
    constexpr size_t kSeveral = 4;
    return gap_s_ > kSlow_s && left_ > 2 * kSeveral ? kSeveral * gap_s_ : 0;
  }

 private:
  size_t left_;
  double gap_s_ = 0;  // between two of them
  double noted_s_ = now_s();
  double looked_s_ = noted_s_;
};

// How one thread waits; it learns from one wait to the next. Not shared between threads.
class Waiter {
 public:
  // Until flag.reached(target). `watch` may be null.
  void wait(Flag& flag, uint32_t target, Watch* watch) {
    if (flag.reached(target) || is_quick([&] { return flag.reached(target); }, watch)) return;
    wait_patiently(flag, target, watch, {now_s(), std::numeric_limits<double>::infinity()});
  }

  // The same without a quick beginning, and not after the deadline; whether it was reached. The watch is told how long
  // the wait has lasted since it began, which may have been in a call before this one.
  struct Period {
    double begin, deadline;  // on the clock of base/clock.h
  };
  bool wait_patiently(Flag& flag, uint32_t target, Watch* watch, const Period& period);

  // Until ready() says yes, for things that cannot wake a sleeper (MPI): sleeps an eighth of the time waited so far.
  template <typename Ready>
  void poll(Ready ready, Watch* watch) {
    poll(ready, watch, [watch](double seconds) {
      const Aside aside(watch);
      nap(seconds);
    });
  }
  // The same where something may: sleep() gets that time, returns at the latest after a moment, and steps aside.
  template <typename Ready, typename Sleep>
  void poll(Ready ready, Watch* watch, Sleep sleep) {
    if (ready()) return;
    const double begin = now_s();
    if (!is_quick(ready, watch)) poll_patiently(ready, watch, {begin, kShortestNap_s}, sleep);
  }

  // Until ready() says yes or the time is over; whether it did.
  template <typename Ready>
  static bool comes_true(Ready ready, double longest_s) {
    constexpr double kPause_s = 1e-3;
    for (const double end = now_s() + longest_s; !ready(); nap(kPause_s))
      if (now_s() >= end) return false;
    return true;
  }

  // As poll() for the parts of a stream; advance() returns how many have come. Where they come slowly it does not spin,
  // and sleeps until several should be there: that leaves the processor to other threads.
  template <typename Advance, typename Sleep>
  void poll_stream(Advance advance, Pace& pace, Watch* watch, Sleep sleep) {
    int came = advance();
    if (came == 0) {
      const auto has_come = [&] { return (came = advance()) > 0; };
      const double begin = now_s();
      const double until_several_s = pace.until_several_s();
      if (until_several_s > 0) {
        const Aside aside(watch);
        nap(until_several_s);
      }
      if (until_several_s > 0 || !is_quick(has_come, watch))
        poll_patiently(has_come, watch, {begin, until_several_s / 8}, sleep);
    }
    pace.note(came);
    if (watch && pace.is_look_due()) watch->check(0);
  }

  // Sleeps, from 20 us to 2 ms.
  static void nap(double seconds);

  // Whether ready() comes true in a moment, in which the thread keeps its core as a rank of MPI does: one that sleeps
  // has to be woken, and where other programs run on the core one that yields comes back late. Calls pause() now and
  // then.
  template <typename Ready, typename Pause>
  static bool comes_soon(Ready ready, const Watch& watch, Pause pause) {
    constexpr double kMoment_s = 1e-3;
    constexpr int kSpins = 16;
    double end = 0;
    for (int i = 1;; ++i) {
      if (ready()) return true;
      relax();
      if (i % kSpins != 0) continue;
      pause();
      const double now = now_s();
      if (end == 0) end = now + kMoment_s;
      if (watch.is_wanted() || now >= end) return false;
    }
  }

  // Spins and yields for a moment; whether ready() came true. Not where another thread waits for the right to work that
  // this one has.
  template <typename Ready>
  bool is_quick(Ready ready, const Watch* watch = nullptr) {
    // A rank that sleeps is late for the others, which then sleep, too: now and then it is worth finding out whether
    // all of this was only for that.
    const double longest_s = ++waits_ % kWaitsPerTrial == 0 ? kLongestSpin_s : spin_s_;
    double begin = 0, spun_s = 0;
    for (int i = 1; spun_s < longest_s; ++i) {
      if (ready()) {
        spin_s_ = std::min(kLongestSpin_s, std::max(spin_s_ + spin_s_ / 16, spun_s));
        return true;
      }
      relax();
      if (i % kSpinsPerLook != 0) continue;
      if (watch && watch->is_wanted()) return false;
      if (i == kSpinsPerLook)
        begin = now_s();
      else
        spun_s = now_s() - begin;
    }
    spin_s_ = std::max(kShortestSpin_s, spin_s_ * 3 / 4);
    double now = now_s();
    for (const double end = now + kYielding_s; now < end && now >= no_yield_before_s_;) {
      if (watch && watch->is_wanted()) return false;
      now = yield(now);
      if (ready()) return true;
    }
    return false;
  }

 private:
  struct Since {
    double begin, shortest_nap_s;
  };
  template <typename Ready, typename Sleep>
  void poll_patiently(Ready ready, Watch* watch, const Since& since, Sleep sleep) {
    double looked = since.begin;
    while (!ready()) {
      const double now = now_s();
      sleep(std::max((now - since.begin) / 8, since.shortest_nap_s));
      if (watch && now - looked > kLookAround_s) {
        watch->check(now - since.begin);
        looked = now;
      }
    }
  }

  static constexpr int kSpinsPerLook = 8;  // at the clock, which takes as long as a spin
  static constexpr double kShortestSpin_s = 0.5e-6, kLongestSpin_s = 12e-6;
  static constexpr unsigned kWaitsPerTrial = 32;
  static constexpr double kYielding_s = 100e-6, kLookAround_s = 0.02, kShortestNap_s = 20e-6, kLongestNap_s = 2e-3;

  // `now`: when the clock was read last. Returns the same.
  double yield(double now);

  double spin_s_ = kLongestSpin_s;
  unsigned waits_ = 0;
  double no_yield_before_s_ = 0;
  double yield_penalty_s_ = 0;
};

}  // namespace ringtrain
