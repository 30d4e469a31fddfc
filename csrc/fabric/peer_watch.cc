#include "fabric/peer_watch.h"

#include "base/log.h"

namespace ringtrain {

void PeerWatch::check(double waited_s) {
  if (node_) node_->check_members();
  const bool is_over = stall_shutdown_s_ > 0 && waited_s > stall_shutdown_s_;
  if (!is_over && (has_warned_ || waited_s < stall_warning_s_)) return;
  const std::string text = "waiting for other ranks in " + doing_ + " for " +
                           std::to_string(static_cast<int>(waited_s)) +
                           " s: some rank is stopped, or its host or network does not answer";
  if (is_over) throw Error(ErrorKind::stalled, text);
  warn(text);
  has_warned_ = true;
}

}  // namespace ringtrain
