#include "network/alarm.h"

#include <algorithm>

namespace ringtrain {
namespace {

constexpr double kMoment_s = 1;
// In a job of more ranks, each tells only its neighbours.
constexpr int kMostTold = 64;
constexpr int kTag = 0;
constexpr size_t kMostBytes = sizeof(ErrorKind) + sizeof(uint64_t) + kLongestErrorText;

Error heard(const Bytes& message, int sender) {
  try {
    Reader reader(message);
    ErrorKind kind = ErrorKind::none;
    reader.get_enum(kind, kLastErrorKind, "kind of error");
    const auto text = reader.get<std::string>();
    if (kind == ErrorKind::none || text.empty()) throw failure("it says nothing");
    return {kind, text};
  } catch (const Error& error) {
    return failure("rank " + std::to_string(sender) + " has failed, and its reason is invalid: " + error.what());
  }
}

}  // namespace

void Alarm::raise(ErrorKind kind, const std::string& text) noexcept {
  if (has_heard_) return;
  has_heard_ = true;
  Writer writer;
  writer.put(kind);
  writer.put(shortened(text));
  tell(writer.take());
}

// A rank that is known to be dead need not hear it, and keeps nobody else from hearing it.
void Alarm::tell(const Bytes& message) noexcept {
  const auto post = [&](int rank) {
    if (rank == all_.rank() || rank >= all_.size()) return;
    try {
      all_.post(rank, kTag, message.data(), message.size());
    } catch (const Error&) {
    }
  };
  if (all_.size() <= kMostTold)
    for (int rank = 0; rank < all_.size(); ++rank) post(rank);
  else
    for (int bit = 1; bit < all_.size(); bit *= 2) post(all_.rank() ^ bit);
  all_.drain(kMoment_s);
}

// The pauses begin short and grow with the wait, since MPI moves on only when it is called.
double Alarm::interval_s(double waited_s) const {
  constexpr double kShortest_s = 50e-6, kLongest_s = 5e-3;
  return std::clamp(waited_s / 8, kShortest_s, kLongest_s);
}

void Alarm::listen() {
  if (!all_.has_arrived_from_any(kTag)) return;
  const int sender = all_.sender(kTag);
  const auto message = all_.take(sender, kTag, kMostBytes, kMoment_s);
  has_heard_ = true;
  if (!message) throw Error(ErrorKind::peer_lost, "a rank has failed, and was gone before it could say why");
  if (all_.size() > kMostTold) tell(*message);
  throw heard(*message, sender);
}

}  // namespace ringtrain
