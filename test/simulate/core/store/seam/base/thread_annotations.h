// Takes the place of csrc/base/thread_annotations.h in the simulation of stores: one fibre runs at a time, and gives
// way only where it waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <stdexcept>

#include "fibres.h"

#define GUARDED_BY(capability)
#define REQUIRES(...)
#define EXCLUDES(...)

namespace ringtrain {

class Mutex {
 public:
  void lock() {
    auto& fibres = simulation::Fibres::current();
    if (is_held_ && fibres.is_running()) fibres.wait([this] { return !is_held_; });
    is_held_ = true;
  }
  void unlock() { is_held_ = false; }

 private:
  bool is_held_ = false;
};

class Lock {
 public:
  explicit Lock(Mutex& mutex) : mutex_(mutex) { mutex_.lock(); }
  ~Lock() { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Mutex& mutex_;
};

class Condition {
 public:
  void notify_all() { ++times_; }
  template <typename Duration, typename Ready>
  bool wait_for(Mutex& mutex, Duration longest, Ready ready) {
    auto& fibres = simulation::Fibres::current();
    const double end = fibres.now() + std::chrono::duration<double>(longest).count();
    while (!ready() && fibres.now() < end) {
      const uint64_t seen = times_;
      mutex.unlock();
      fibres.wait([this, seen] { return times_ != seen; }, end);
      mutex.lock();
    }
    return ready();
  }

 private:
  uint64_t times_ = 0;
};

}  // namespace ringtrain
