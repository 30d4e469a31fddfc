// The Watch of an engine: the other ranks must be alive and well, and no wait may last longer than the options allow.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "fabric/alarm.h"
#include "fabric/node.h"
#include "fabric/watch.h"

namespace ringtrain {

class PeerWatch final : public Watch {
 public:
  PeerWatch(double stall_warning_s, double stall_shutdown_s)
      : stall_warning_s_(stall_warning_s), stall_shutdown_s_(stall_shutdown_s) {}

  // From then on the members of the node are looked after, the alarm is listened to. Both outlive this.
  void look_after(Node& node) { node_ = &node; }
  void listen_to(Alarm& alarm) { alarm_ = &alarm; }

  // What this rank is about to wait for, for messages: "allreduce \"layer1.weight\"". Not copied, so it must live as
  // long as anybody waits for it.
  void now_doing(std::string_view what) {
    doing_ = what;
    has_warned_ = false;
  }

  // Asked now and then while a caller's own thread waits: whether it was interrupted. Null for the engine's thread.
  void set_interrupt(const std::function<bool()>* is_interrupted) {
    is_interrupted_ = is_interrupted;
    interrupted_since_ = 0;
  }

  // Throws if another rank is gone or has failed. Cheap enough to be called often.
  void look();
  void check(double waited_s) override;
  double interval_s(double waited_s) const override;

 private:
  void check_interrupt();

  const double stall_warning_s_;
  const double stall_shutdown_s_;  // 0: never
  Node* node_ = nullptr;           // null when no other rank shares this rank's node
  Alarm* alarm_ = nullptr;         // null when all ranks share one node
  double next_roll_call_s_ = 0;
  std::string_view doing_ = "ringtrain's start";
  bool has_warned_ = false;
  const std::function<bool()>* is_interrupted_ = nullptr;
  double interrupted_since_ = 0;  // 0: not
};

}  // namespace ringtrain
