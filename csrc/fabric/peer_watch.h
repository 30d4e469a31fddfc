// The Watch of an engine: the other ranks of the node must be alive, and no wait may last longer than the options
// allow.
#pragma once

#include <string>

#include "fabric/node.h"
#include "fabric/watch.h"

namespace ringtrain {

class PeerWatch final : public Watch {
 public:
  PeerWatch(double stall_warning_s, double stall_shutdown_s)
      : stall_warning_s_(stall_warning_s), stall_shutdown_s_(stall_shutdown_s) {}

  // From then on its members are looked after; `node` outlives this.
  void look_after(Node& node) { node_ = &node; }

  // What this rank is about to wait for, for messages: "allreduce \"layer1.weight\"".
  void now_doing(std::string what) {
    doing_ = std::move(what);
    has_warned_ = false;
  }

  void check(double waited_s) override;

 private:
  const double stall_warning_s_;
  const double stall_shutdown_s_;  // 0: never
  Node* node_ = nullptr;           // null when no other rank shares this rank's node
  std::string doing_ = "ringtrain's start";
  bool has_warned_ = false;
};

}  // namespace ringtrain
