#include "coordination/mpi_wire.h"

#include <algorithm>
#include <memory>

#include "base/bytes.h"

namespace ringtrain {

// The last messages of a wire are what the others need to end well, so they get a moment to leave.
MpiWire::~MpiWire() {
  constexpr double kMoment_s = 1;
  const double end = now_s() + kMoment_s;
  try {
    waiter_.poll([&] { return (forget_sent(), outgoing_.empty()) || now_s() > end; }, nullptr);
  } catch (const Error&) {
    // Who should have received them is gone.
  }
}

void MpiWire::send(int to, Tag tag, const void* data, size_t bytes) {
  forget_sent();
  const char* begin = static_cast<const char*>(data);
  const auto message = std::make_shared<Bytes>(begin, begin + bytes);
  const Mpi::Lending lending(&mpi_, message);
  outgoing_.push_back(mpi_.isend(message->data(), bytes, ranks_[to], mpi_tag(tag), mpi_.world()));
}

void MpiWire::forget_sent() {
  outgoing_.remove_if([&](MpiRequest& request) { return mpi_.test(request); });
}

void MpiWire::receive(int from, Tag tag, void* data, size_t bytes) { receive_from(ranks_[from], tag, data, bytes); }

void MpiWire::receive_from_any(Tag tag, void* data, size_t bytes) {
  receive_from(mpi_.sender(ranks_, mpi_tag(tag), mpi_.world()), tag, data, bytes);
}

// MPI writes to memory of its own, since the caller's goes when the Watch throws.
void MpiWire::receive_from(int rank, Tag tag, void* data, size_t bytes) {
  const auto message = std::make_shared<Bytes>(bytes);
  const Mpi::Lending lending(&mpi_, message);
  MpiRequest request = mpi_.irecv(message->data(), bytes, rank, mpi_tag(tag), mpi_.world());
  waiter_.poll([&] { return mpi_.test(request); }, &watch_);
  std::copy(message->begin(), message->end(), static_cast<char*>(data));
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
