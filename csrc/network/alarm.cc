#include "network/alarm.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "base/wait.h"

namespace ringtrain {
namespace {

constexpr double kMoment_s = 1;

}  // namespace

// A rank that MPI knows to be dead need not hear it, and keeps nobody else from hearing it.
void Alarm::raise(ErrorKind kind, const std::string& text) noexcept {
  if (has_heard_) return;
  has_heard_ = true;
  const std::string words = shortened(text);
  const auto message = std::make_shared<Message>();
  message->kind = kind;
  message->length = static_cast<uint32_t>(words.size());
  std::memcpy(message->text, words.data(), words.size());
  const size_t bytes = offsetof(Message, text) + words.size();
  const Mpi::Lending lending(&mpi_, message);
  std::vector<MpiRequest> requests;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    try {
      requests.push_back(mpi_.isend(message.get(), bytes, rank, tag_, mpi_.world()));
    } catch (const Error&) {
    }
  }
  const auto all_are_over = [&] {
    return std::all_of(requests.begin(), requests.end(), [&](MpiRequest& request) { return is_over(request); });
  };
  Waiter::comes_true(all_are_over, kMoment_s);
}

bool Alarm::is_over(MpiRequest& request) {
  try {
    return mpi_.test(request);
  } catch (const Error&) {
    return true;
  }
}

void Alarm::listen() {
  if (!mpi_.has_arrived_from_any(tag_, mpi_.world())) return;
  std::vector<int> ranks(static_cast<size_t>(size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  const int sender = mpi_.sender(ranks, tag_, mpi_.world());
  const auto message = std::make_shared<Message>();
  const Mpi::Lending lending(&mpi_, message);
  MpiRequest request = mpi_.irecv(message.get(), sizeof(Message), sender, tag_, mpi_.world());
  const double end = now_s() + kMoment_s;
  bool has_come = false;
  Waiter().poll([&] { return (has_come = mpi_.test(request)) || now_s() > end; }, nullptr);
  has_heard_ = true;
  if (!has_come) throw Error(ErrorKind::peer_lost, "a rank has failed, and was gone before it could say why");
  throw Error(message->kind, std::string(message->text, message->length));
}

}  // namespace ringtrain
