#include "coordination/mpi_wire.h"

#include "base/error.h"

namespace ringtrain {

// The last messages of a wire are what the others need to end well, so they get a moment to leave.
MpiWire::~MpiWire() {
  constexpr double kMoment_s = 1;
  const double end = now_s() + kMoment_s;
  try {
    waiter_.poll([&] { return (forget_sent(), outgoing_.empty()) || now_s() > end; }, nullptr);
  } catch (const Error&) {
    // Who should have received them is gone; what is left is given up below.
  }
  for (Outgoing& outgoing : outgoing_) mpi_.cancel(outgoing.request);
}

void MpiWire::send(int to, Tag tag, const void* data, size_t bytes) {
  forget_sent();
  const char* begin = static_cast<const char*>(data);
  Outgoing& outgoing = outgoing_.emplace_back(Outgoing{Bytes(begin, begin + bytes), {}});
  outgoing.request = mpi_.isend(outgoing.data.data(), bytes, ranks_[to], mpi_tag(tag), mpi_.world());
}

void MpiWire::forget_sent() {
  outgoing_.remove_if([&](Outgoing& outgoing) { return mpi_.test(outgoing.request); });
}

void MpiWire::receive(int from, Tag tag, void* data, size_t bytes) {
  complete(mpi_.irecv(data, bytes, ranks_[from], mpi_tag(tag), mpi_.world()));
}

void MpiWire::receive_from_any(Tag tag, void* data, size_t bytes) {
  complete(mpi_.irecv(data, bytes, mpi_.sender(ranks_, mpi_tag(tag), mpi_.world()), mpi_tag(tag), mpi_.world()));
}

void MpiWire::complete(MpiRequest request) {
  try {
    waiter_.poll([&] { return mpi_.test(request); }, &watch_);
  } catch (...) {
    mpi_.cancel(request);
    throw;
  }
}

bool MpiWire::has_arrived(Tag tag) { return mpi_.has_arrived_from_any(mpi_tag(tag), mpi_.world()); }

bool MpiWire::arrives_within(int from, Tag tag, double seconds) {
  const double end = now_s() + seconds;
  bool has_come = false;
  waiter_.poll([&] { return (has_come = mpi_.has_arrived(ranks_[from], mpi_tag(tag), mpi_.world())) || now_s() > end; },
               nullptr);
  return has_come;
}

}  // namespace ringtrain
