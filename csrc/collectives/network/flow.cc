#include "collectives/network/flow.h"

namespace ringtrain {

int Flow::step() {
  const size_t before = arrived_ + sent_;
  while (post_receive()) {
  }
  while (post_send()) {
  }
  while (finish_receive()) {
  }
  while (finish_send()) {
  }
  return static_cast<int>(arrived_ + sent_ - before);
}

void Flow::wait() {
  peers_.wait_for_some([&] { return step(); }, pace_);
}

bool Flow::post_receive() {
  const size_t i = receives_posted_;
  if (i == count_ || i == arrived_ + kWindow || !messages_.may_receive(i, sent_)) return false;
  const Message message = messages_.incoming(i);
  if (message.bytes > 0) receives_[i % kWindow] = peers_.receive(message);
  ++receives_posted_;
  return true;
}

bool Flow::post_send() {
  const size_t i = sends_posted_;
  if (i == count_ || i == sent_ + kWindow || !messages_.may_send(i, arrived_)) return false;
  const Message message = messages_.outgoing(i);
  if (message.bytes > 0) sends_[i % kWindow] = peers_.send(message);
  ++sends_posted_;
  return true;
}

bool Flow::finish_receive() {
  if (arrived_ == receives_posted_ || !peers_.mpi().test(receives_[arrived_ % kWindow])) return false;
  messages_.arrived(arrived_++);
  return true;
}

bool Flow::finish_send() {
  if (sent_ == sends_posted_ || !peers_.mpi().test(sends_[sent_ % kWindow])) return false;
  ++sent_;
  return true;
}

}  // namespace ringtrain
