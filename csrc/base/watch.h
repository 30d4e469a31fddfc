// A failure detector: every wait for other ranks asks it now and then whether waiting still makes sense.
#pragma once

#include <string>

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

// Where a rank hears that others are dead or have failed, such as their signs of life, or messages.
class NewsSource {
 public:
  virtual ~NewsSource() = default;

  // Throws what it has heard.
  virtual void listen() = 0;
  // How long one need not listen again.
  virtual double pause_s() const { return 0; }
  // After how many seconds of sleep somebody who has waited for so long wants to listen.
  virtual double interval_s(double waited_s) const = 0;
  // Who does not answer although it is alive, for a message: "rank 3 (...) is stopped, by SIGSTOP or a debugger; ".
  virtual std::string who_is_stopped() const { return ""; }
};

}  // namespace ringtrain
