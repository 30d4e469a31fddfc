// Looked at now and then by everybody who waits for other ranks: is it still worth waiting?
#pragma once

#include "base/error.h"

namespace ringtrain {

class Watch {
 public:
  virtual ~Watch() = default;

  // Throws PeerLost, Stalled or what another rank failed with. `waited_s`: how long this wait has lasted.
  // Engine thread only.
  virtual void check(double waited_s) = 0;

  // After how many seconds of sleep it wants to be asked again.
  virtual double interval_s(double waited_s) const = 0;
};

// Of nobody else, only of the time. Any thread.
class LimitWatch final : public Watch {
 public:
  // Throws failure with this text after so many seconds.
  LimitWatch(double longest_s, const char* text) : longest_s_(longest_s), text_(text) {}
  void check(double waited_s) override {
    if (waited_s > longest_s_) throw failure(text_);
  }
  double interval_s(double) const override { return longest_s_ / 10; }

 private:
  const double longest_s_;
  const char* const text_;
};

}  // namespace ringtrain
