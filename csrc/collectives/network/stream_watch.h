// A Watch for who waits in shared memory while messages are under way over the network: it moves them on.
#pragma once

#include <algorithm>

#include "base/watch.h"
#include "collectives/network/pipeline.h"

namespace ringtrain {

// Requires Engine::turn_.
class StreamWatch final : public Watch {
 public:
  explicit StreamWatch(Watch& watch) : watch_(watch) {}

  // Moves a Stream on as long as this lives.
  class Attendance {
   public:
    Attendance(StreamWatch& watch, Stream* stream) : watch_(watch) { watch_.stream_ = stream; }
    ~Attendance() { watch_.stream_ = nullptr; }
    Attendance(const Attendance&) = delete;
    Attendance& operator=(const Attendance&) = delete;

   private:
    StreamWatch& watch_;
  };

  void check(double waited_s) override {
    if (stream_) stream_->step();
    watch_.check(waited_s);
  }
  double interval_s(double waited_s) const override {
    constexpr double kLongest_s = 200e-6;
    return stream_ ? std::min(kLongest_s, watch_.interval_s(waited_s)) : watch_.interval_s(waited_s);
  }

 private:
  Watch& watch_;
  Stream* stream_ = nullptr;  // null while there is none
};

}  // namespace ringtrain
