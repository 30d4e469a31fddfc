// A failure detector: every wait for other ranks asks it now and then whether waiting still makes sense.
#pragma once

namespace ringtrain {

class Watch {
 public:
  virtual ~Watch() = default;

  // Throws PeerLost, Stalled or what another rank failed with. `waited_s`: how long this wait has lasted.
  // Called by the thread that waits. The Watch of an Engine requires Engine::turn_.
  virtual void check(double waited_s) = 0;

  // After how many seconds of sleep it wants to be asked again.
  virtual double interval_s(double waited_s) const = 0;
};

}  // namespace ringtrain
