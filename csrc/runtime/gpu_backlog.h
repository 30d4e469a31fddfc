// What was put into the GPU's stream and is not done yet. Nobody waits there, so this looks after it: work that waits
// for a rank that is gone never ends by itself.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "base/error.h"
#include "gpu/gpu.h"

namespace ringtrain {

// Requires Engine::turn_.
class GpuBacklog {
 public:
  // After how many seconds it warns, and throws StalledError; 0: never.
  struct Limits {
    double stall_warning_s, stall_shutdown_s;
  };
  explicit GpuBacklog(const Limits& limits) : limits_(limits) {}

  // `title`: of the operation, for messages. `commands`: that it has put into the stream.
  void add(GpuEventPtr done, const std::string& title, uint64_t commands);
  // Before an operation: waits where so much is there already that the driver might keep the next call waiting, in
  // which nobody would look after the other ranks.
  void make_room(const Gpu& gpu, Watch& watch);
  bool is_empty() const { return pending_.empty(); }
  // Forgets what is done. Throws when the rest takes too long.
  void look();
  // The rest will never be done; who asks for it gets the reason.
  void fail(const Error& reason);

 private:
  struct Pending {
    GpuEventPtr done;
    std::string title;
    uint64_t commands;
    double since_s;
  };
  std::string text(double waited_s) const;

  const Limits limits_;
  std::deque<Pending> pending_;  // in the order of the stream
  uint64_t commands_ = 0;        // of all of them
  bool has_warned_ = false;      // of the first one
};

}  // namespace ringtrain
