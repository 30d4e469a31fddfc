// A stream of messages out and another in, several of each under way all the time.
#pragma once

#include <algorithm>
#include <cstddef>

#include "network/endpoint.h"

namespace ringtrain {

// A piece of memory that goes to a peer, or comes from it. Empty ones are not sent: both sides know the sizes.
struct Message {
  char* data = nullptr;
  size_t bytes = 0;
  int peer = 0;
};

// Describes the messages 0 .. count() - 1 of both directions; implemented by each algorithm. Each direction goes in
// this order, so two ranks must have the messages between them in the same order.
class Messages {
 public:
  virtual ~Messages() = default;
  virtual size_t count() const = 0;
  virtual Message outgoing(size_t i) = 0;
  virtual Message incoming(size_t i) = 0;
  // Message i is there; called in order.
  virtual void arrived(size_t) {}
  // Whether message i may go out when so many have arrived, and may come in when so many have been sent.
  virtual bool may_send(size_t, size_t /*arrived*/) const { return true; }
  virtual bool may_receive(size_t, size_t /*sent*/) const { return true; }
};

// What is under way when it goes, after an error, stays with the Network.
class Flow {
 public:
  // Both outlive this.
  Flow(Endpoint& peers, Messages& messages)
      : peers_(peers), messages_(messages), count_(messages.count()), pace_(2 * count_) {}

  bool is_done() const { return completed() == count_; }
  // How many messages have both arrived and been sent.
  size_t completed() const { return std::min(arrived_, sent_); }
  // Starts and finishes what it can without waiting; how many sends and receives it has finished.
  int step();
  // Waits until there was something to finish.
  void wait();

  static constexpr size_t kWindow = 8;  // messages under way in each direction

 private:
  bool post_receive();
  bool post_send();
  bool finish_receive();
  bool finish_send();

  Endpoint& peers_;
  Messages& messages_;
  const size_t count_;
  size_t receives_posted_ = 0, arrived_ = 0, sends_posted_ = 0, sent_ = 0;
  NetworkRequest receives_[kWindow], sends_[kWindow];
  Pace pace_;
};

// All of them, from the first to the last.
void run(Endpoint& peers, Messages& messages);
// One message each way, cut into chunks.
void exchange(Endpoint& peers, const Message& outgoing, const Message& incoming, size_t chunk_bytes);

}  // namespace ringtrain
