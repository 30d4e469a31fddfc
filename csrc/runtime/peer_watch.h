// The Watch of an engine: the other ranks must be alive and well, and no wait may last longer than the options allow.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread_annotations.h"
#include "base/wait.h"

namespace ringtrain {

// That this rank cannot go on, and why. Any thread may say so, and all that wait throw the reason. The first one
// counts.
class OwnFailure {
 public:
  void set(const Error& reason);
  // Throws the reason if there is one. Cheap.
  void require_none() const {
    if (is_set_.load(std::memory_order_acquire)) throw Error(*reason_);
  }

 private:
  Mutex mutex_;
  std::atomic<bool> is_set_{false};  // changes under mutex_
  std::optional<Error> reason_;      // constant once that is true
};

// One for each thread that waits, or for a right that one thread at a time has, such as the turn. Not shared.
class PeerWatch final : public Watch {
 public:
  // How long a wait may last before it is warned of, and before it ends with an error; 0: never.
  struct Limits {
    double stall_warning_s, stall_shutdown_s;
  };
  // All outlive this. `turn`: of the thread that waits.
  PeerWatch(const OwnFailure& own_failure, const Limits& limits, TurnMutex& turn)
      : own_failure_(own_failure), limits_(limits), turn_(turn) {}
  void set_limits(const Limits& limits) { limits_ = limits; }
  // The same for another thread, without what concerns a caller that waits here now.
  PeerWatch for_another_thread() const {
    PeerWatch watch = *this;
    watch.set_interrupt(nullptr);
    watch.on_sent_all_ = nullptr;
    watch.set_deadline(std::numeric_limits<double>::infinity());
    return watch;
  }

  // A source outlives that, and allows the thread that waits to listen. The latest one is listened to first: memory
  // that is shared with a rank has its last words before a connection ends with it.
  void listen_to(NewsSource& source) { sources_.insert(sources_.begin(), {&source}); }
  void stop_listening_to(const NewsSource& source);

  // Sets what this rank is about to wait for, for messages: "allreduce \"layer1.weight\"".
  void now_doing(std::string_view what) {
    doing_ = what;
    has_warned_ = false;
  }

  // Says what this rank has submitted and waits for, for messages.
  void set_pending(std::function<std::string()> pending) { pending_ = std::move(pending); }

  // Ends a wait without progress with a StalledError from this time on, on the clock of base/clock.h: the caller whose
  // thread waits has a timeout.
  void set_deadline(double deadline_s) { deadline_s_ = deadline_s; }
  // Called when the thread that waits has let go of the turn.
  void set_on_aside(std::function<void()> on_aside) { on_aside_ = std::move(on_aside); }
  // While one lives, has_sent_all() calls `work`; null for nothing.
  class Meanwhile {
   public:
    Meanwhile(PeerWatch& watch, const std::function<void()>* work) : watch_(watch) { watch_.on_sent_all_ = work; }
    ~Meanwhile() { watch_.on_sent_all_ = nullptr; }
    Meanwhile(const Meanwhile&) = delete;
    Meanwhile& operator=(const Meanwhile&) = delete;

   private:
    PeerWatch& watch_;
  };
  // Asked now and then while a caller's own thread waits: whether it was interrupted. Null for the engine's thread.
  void set_interrupt(const std::function<bool()>* is_interrupted) {
    is_interrupted_ = is_interrupted;
    interrupted_since_ = 0;
  }

  // Throws if another rank is gone or has failed, or if this one has. Cheap enough to be called often.
  void look();
  // Returns why a rank was lost, or the error itself where nobody says. A rank that cannot go on tells that before it
  // goes, so another one that sees it go names the first cause.
  Error with_reason(const Error& error);
  void check(double waited_s) override;
  double interval_s(double waited_s) const override;
  bool is_wanted() const override { return turn_.is_wanted(); }
  void has_sent_all() override {
    if (on_sent_all_) (*on_sent_all_)();
  }
  void step_aside() override NOT_ANALYSED {
    turn_.unlock();
    if (on_aside_) on_aside_();
  }
  void step_back() override NOT_ANALYSED { turn_.lock(); }

 private:
  struct Source {
    NewsSource* news;
    double next_s = 0;  // when to listen again
  };

  void check_interrupt();
  std::string who_is_stopped(double waited_s) const;
  std::string stall_text(double waited_s, const std::string& stopped) const;

  const OwnFailure& own_failure_;
  Limits limits_;
  TurnMutex& turn_;
  std::function<void()> on_aside_;
  const std::function<void()>* on_sent_all_ = nullptr;
  std::vector<Source> sources_;
  std::string doing_ = "ringtrain's start";
  std::function<std::string()> pending_ = [] { return "nothing is pending here"; };
  bool has_warned_ = false;
  const std::function<bool()>* is_interrupted_ = nullptr;
  double interrupted_since_ = 0;  // 0: not
  double deadline_s_ = std::numeric_limits<double>::infinity();
};

}  // namespace ringtrain
