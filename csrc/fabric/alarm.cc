#include "fabric/alarm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "fabric/wait.h"

namespace ringtrain {

void Alarm::raise(ErrorKind kind, const std::string& text) noexcept {
  constexpr double kMoment_s = 1;
  if (has_heard_) return;
  has_heard_ = true;
  Message message = {};
  message.kind = kind;
  std::memcpy(message.text, text.data(), std::min(text.size(), sizeof(message.text) - 1));
  std::vector<MpiRequest> requests;
  const double end = now_s() + kMoment_s;
  try {
    for (int rank = 0; rank < size_; ++rank)
      if (rank != rank_) requests.push_back(mpi_.isend(&message, sizeof(message), rank, tag_, mpi_.world()));
    auto is_sent = [&](MpiRequest& request) { return mpi_.test(request); };
    Waiter().poll([&] { return std::all_of(requests.begin(), requests.end(), is_sent) || now_s() > end; }, nullptr);
  } catch (const Error&) {
    // A dead rank need not hear it.
  }
  for (MpiRequest& request : requests) mpi_.cancel(request);
}

void Alarm::listen() {
  if (!mpi_.has_arrived_from_any(tag_, mpi_.world())) return;
  Message message = {};
  MpiRequest request = mpi_.irecv_from_any(&message, sizeof(message), tag_, mpi_.world());
  Waiter().poll([&] { return mpi_.test(request); }, nullptr);  // it is there already
  has_heard_ = true;
  throw Error(message.kind, message.text);
}

}  // namespace ringtrain
