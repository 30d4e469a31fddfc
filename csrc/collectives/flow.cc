#include "collectives/flow.h"

namespace ringtrain {

Flow::~Flow() {
  for (size_t i = 0; i < kWindow; ++i) {
    mpi_.cancel(receives_[i]);
    mpi_.cancel(sends_[i]);
  }
}

bool Flow::step() {
  bool has_moved = false;
  while (post_receive()) has_moved = true;
  while (post_send()) has_moved = true;
  if (finish_receive()) has_moved = true;
  if (finish_send()) has_moved = true;
  return has_moved;
}

bool Flow::post_receive() {
  const size_t i = receives_posted_;
  if (i == count_ || i == arrived_ + kWindow) return false;
  const Span span = messages_.incoming(i);
  if (span.bytes > 0)
    receives_[i % kWindow] =
        mpi_.irecv(span.data, span.bytes, neighbours_.from, neighbours_.tag, neighbours_.communicator);
  ++receives_posted_;
  return true;
}

bool Flow::post_send() {
  const size_t i = sends_posted_;
  if (i == count_ || i == sent_ + kWindow || i >= messages_.may_send(arrived_)) return false;
  const Span span = messages_.outgoing(i);
  if (span.bytes > 0)
    sends_[i % kWindow] = mpi_.isend(span.data, span.bytes, neighbours_.to, neighbours_.tag, neighbours_.communicator);
  ++sends_posted_;
  return true;
}

bool Flow::finish_receive() {
  if (arrived_ == receives_posted_ || !mpi_.test(receives_[arrived_ % kWindow])) return false;
  messages_.arrived(arrived_++);
  return true;
}

bool Flow::finish_send() {
  if (sent_ == sends_posted_ || !mpi_.test(sends_[sent_ % kWindow])) return false;
  ++sent_;
  return true;
}

}  // namespace ringtrain
