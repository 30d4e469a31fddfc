#include "fabric/alarm.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <vector>

#include "fabric/wait.h"

namespace ringtrain {
namespace {

constexpr double kMoment_s = 1;

}  // namespace

void Alarm::raise(ErrorKind kind, const std::string& text) noexcept {
  if (has_heard_) return;
  has_heard_ = true;
  const std::string words = shortened(text);
  outgoing_.kind = kind;
  outgoing_.length = static_cast<uint32_t>(words.size());
  std::memcpy(outgoing_.text, words.data(), words.size());
  const size_t bytes = offsetof(Message, text) + words.size();
  std::vector<MpiRequest> requests;
  const double end = now_s() + kMoment_s;
  try {
    for (int rank = 0; rank < size_; ++rank)
      if (rank != rank_) requests.push_back(mpi_.isend(&outgoing_, bytes, rank, tag_, mpi_.world()));
    auto is_sent = [&](MpiRequest& request) { return mpi_.test(request); };
    Waiter().poll([&] { return std::all_of(requests.begin(), requests.end(), is_sent) || now_s() > end; }, nullptr);
  } catch (const Error&) {
    // A dead rank need not hear it.
  }
  for (MpiRequest& request : requests) mpi_.cancel(request);
}

void Alarm::listen() {
  if (!mpi_.has_arrived_from_any(tag_, mpi_.world())) return;
  std::vector<int> ranks(static_cast<size_t>(size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  const int sender = mpi_.sender(ranks, tag_, mpi_.world());
  MpiRequest request = mpi_.irecv(&incoming_, sizeof(incoming_), sender, tag_, mpi_.world());
  const double end = now_s() + kMoment_s;
  bool has_come = false;
  Waiter().poll([&] { return (has_come = mpi_.test(request)) || now_s() > end; }, nullptr);
  has_heard_ = true;
  if (!has_come) throw Error(ErrorKind::peer_lost, "a rank has failed, and was gone before it could say why");
  throw Error(incoming_.kind, std::string(incoming_.text, incoming_.length));
}

}  // namespace ringtrain
