// A stream of messages to one rank while another comes from one rank, several of each under way all the time.
#pragma once

#include <cstddef>

#include "fabric/mpi.h"

namespace ringtrain {

// Where a message lies. Empty messages are not sent: both sides know the sizes.
struct Span {
  char* data = nullptr;
  size_t bytes = 0;
};

// Describes the messages 0 .. count() - 1 of both directions; implemented by each algorithm.
class Messages {
 public:
  virtual ~Messages() = default;
  virtual size_t count() const = 0;
  virtual Span outgoing(size_t i) = 0;
  virtual Span incoming(size_t i) = 0;
  // Message i is there; called in order.
  virtual void arrived(size_t) {}
  // How many messages may have been sent at most when so many have arrived.
  virtual size_t may_send(size_t arrived) const = 0;
};

class Flow {
 public:
  struct Neighbours {
    int to, from;  // ranks of `communicator`
    int tag;
    MpiComm communicator;
  };

  Flow(Mpi& mpi, const Neighbours& neighbours, Messages& messages)
      : mpi_(mpi), neighbours_(neighbours), messages_(messages), count_(messages.count()) {}
  ~Flow();  // gives up what is still under way

  bool is_done() const { return arrived_ == count_ && sent_ == count_; }
  // Starts and finishes what it can without waiting; whether there was anything.
  bool step();

  static constexpr size_t kWindow = 4;  // messages under way in each direction

 private:
  bool post_receive();
  bool post_send();
  bool finish_receive();
  bool finish_send();

  Mpi& mpi_;
  const Neighbours neighbours_;
  Messages& messages_;
  const size_t count_;
  size_t receives_posted_ = 0, arrived_ = 0, sends_posted_ = 0, sent_ = 0;
  MpiRequest receives_[kWindow], sends_[kWindow];
};

}  // namespace ringtrain
