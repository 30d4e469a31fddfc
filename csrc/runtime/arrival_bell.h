// Rings the engine's bell when something has come from another host, so that an engine without work can sleep until
// then.
#pragma once

#include <atomic>
#include <thread>

#include "base/descriptor.h"
#include "base/wait.h"

namespace ringtrain {

class ArrivalBell {
 public:
  // `descriptor`: Network::descriptor(), not negative. It and the bell outlive this.
  ArrivalBell(int descriptor, Flag& bell);
  ~ArrivalBell();

  // It will ring once, at once if something has come already. Costs a system call.
  void arm();

 private:
  void listen();

  const int network_;
  Flag& bell_;
  const Descriptor epoll_, end_;  // end_: readable when the thread is to end
  std::thread thread_;
};

}  // namespace ringtrain
