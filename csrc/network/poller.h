// Sockets that are waited for together, by epoll.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/descriptor.h"

namespace ringtrain {

// Called when its socket is ready. Not shared between threads.
class Watched {
 public:
  virtual ~Watched() = default;
  virtual void is_ready(uint32_t events) = 0;  // of epoll

 private:
  friend class Poller;
  bool is_for_writing_ = false;
  bool is_over_ = false;  // events that were there before mean nothing
};

class Poller {
 public:
  Poller();

  // Readable when something is ready.
  int descriptor() const { return epoll_.number(); }

  void add(int socket, Watched& watched, bool for_writing);
  void wait_for_writing(int socket, Watched& watched, bool for_writing);
  void remove(int socket);
  // Destroys it when nobody looks at it any more: it may be the one that is called.
  void bury(std::unique_ptr<Watched> watched);

  // Calls those that are ready, without waiting. If one of them throws, the others are called before this throws that:
  // a listener without descriptors keeps nobody else waiting. Returns whether one was.
  bool run();

 private:
  void control(int operation, int socket, Watched& watched, bool for_writing);

  const Descriptor epoll_;
  std::vector<std::unique_ptr<Watched>> buried_;
};

}  // namespace ringtrain
