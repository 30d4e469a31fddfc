// The Watch of an engine: the other ranks must be alive and well, and no wait may last longer than the options allow.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/watch.h"
#include "memory/node.h"
#include "network/alarm.h"

namespace ringtrain {

class PeerWatch final : public Watch {
 public:
  // How long a wait may last before it is warned of, and before it ends with an error; 0: never.
  struct Limits {
    double stall_warning_s, stall_shutdown_s;
  };
  explicit PeerWatch(const Limits& limits) : limits_(limits) {}
  void set_limits(const Limits& limits) { limits_ = limits; }

  // Any thread: this rank cannot go on, and whoever waits here next throws the reason. The first one counts.
  void give_up(const Error& reason);
  // Throws the reason if there is one. Cheap.
  void require_not_given_up() {
    if (has_given_up_.load(std::memory_order_acquire)) throw Error(*reason_);
  }

  // From then on the members of the node are looked after, and the alarm is listened to unless it is null. Both outlive
  // that.
  void look_after(Node& node) { node_ = &node; }
  void listen_to(Alarm* alarm) { alarm_ = alarm; }

  // What this rank is about to wait for, for messages: "allreduce \"layer1.weight\"".
  void now_doing(std::string_view what) {
    doing_ = what;
    has_warned_ = false;
  }

  // Says what this rank has submitted and waits for, for messages. Called by who waits.
  void set_pending(std::function<std::string()> pending) { pending_ = std::move(pending); }

  // Asked now and then while a caller's own thread waits: whether it was interrupted. Null for the engine's thread.
  void set_interrupt(const std::function<bool()>* is_interrupted) {
    is_interrupted_ = is_interrupted;
    interrupted_since_ = 0;
  }

  // Throws if another rank is gone or has failed, or if this one has given up. Cheap enough to be called often.
  void look();
  void check(double waited_s) override;
  double interval_s(double waited_s) const override;

 private:
  void check_interrupt();
  std::string stall_text(double waited_s) const;

  Limits limits_;
  Node* node_ = nullptr;    // null when no other rank shares this rank's node
  Alarm* alarm_ = nullptr;  // null when all ranks share one node
  double next_roll_call_s_ = 0;
  std::string doing_ = "ringtrain's start";
  std::function<std::string()> pending_ = [] { return "nothing is pending here"; };
  bool has_warned_ = false;
  const std::function<bool()>* is_interrupted_ = nullptr;
  double interrupted_since_ = 0;  // 0: not

  std::mutex giving_up_;
  std::atomic<bool> has_given_up_{false};
  std::optional<Error> reason_;  // written once, under the mutex, before the flag says so
};

}  // namespace ringtrain
