// What was put into the GPU's stream and is not done yet. Nobody waits there, so this looks after it: work that waits
// for a rank that is gone never ends by itself.
#pragma once

#include <deque>
#include <string>

#include "base/error.h"
#include "fabric/gpu.h"

namespace ringtrain {

// For who has the engine's turn.
class GpuBacklog {
 public:
  // After how many seconds it warns, and throws StalledError; 0: never.
  struct Limits {
    double stall_warning_s, stall_shutdown_s;
  };
  explicit GpuBacklog(const Limits& limits) : limits_(limits) {}

  // `title`: of the operation, for messages.
  void add(GpuEventPtr done, const std::string& title);
  bool is_empty() const { return pending_.empty(); }
  // Forgets what is done. Throws when the rest takes too long.
  void look();
  // The rest will never be done; who asks for it gets the reason.
  void give_up(const Error& reason);

 private:
  struct Pending {
    GpuEventPtr done;
    std::string title;
    double since_s;
  };
  std::string text(double waited_s) const;

  const Limits limits_;
  std::deque<Pending> pending_;  // in the order of the stream
  bool has_warned_ = false;      // of the first one
};

}  // namespace ringtrain
