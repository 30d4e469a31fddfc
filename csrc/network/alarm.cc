#include "network/alarm.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace ringtrain {
namespace {

constexpr double kMoment_s = 1;
constexpr int kTag = 0;
// The first byte of a message; only a failure has more.
constexpr char kFailure = 'f', kQuestion = 'q', kAnswer = 'a';
constexpr size_t kMostBytes = sizeof(kFailure) + sizeof(ErrorKind) + sizeof(uint64_t) + kLongestErrorText;

// How many ranks one rank asks, and how often at most.
constexpr size_t kMostAsked = 64;
constexpr double kPause_s = 1;
// After which a rank without an answer is named.
constexpr double kSilence_s = 1;
constexpr size_t kMostNamed = 3;

Error heard(const Bytes& message, int sender) {
  try {
    Reader reader(message);
    const auto first = reader.get<char>();
    ErrorKind kind = ErrorKind::none;
    reader.get_enum(kind, kLastErrorKind, "kind of error");
    const auto text = reader.get<std::string>();
    if (first != kFailure || kind == ErrorKind::none || text.empty()) throw failure("it says nothing");
    return {kind, text};
  } catch (const Error& error) {
    return failure("rank " + std::to_string(sender) + " has failed, and its reason is invalid: " + error.what());
  }
}

Bytes message_of(ErrorKind kind, const std::string& text) {
  Writer writer;
  writer.put(kFailure);
  writer.put(kind);
  writer.put(shortened(text));
  return writer.take();
}

}  // namespace

Alarm::Alarm(Endpoint all, std::vector<RankName> names)
    : all_(std::move(all)), names_(std::move(names)), asked_since_(names_.size()) {
  for (int distance = 1; distance < all_.size(); ++distance) others_.push_back(all_.wrap(all_.rank() + distance));
}

void Alarm::raise(ErrorKind kind, const std::string& text) noexcept {
  if (has_heard_) return;
  has_heard_ = true;
  tell(message_of(kind, text));
}

bool Alarm::is_neighbour(int rank) const {
  const auto is_power_of_two = [](int number) { return (number & (number - 1)) == 0; };
  const int distance = all_.wrap(rank - all_.rank());
  return is_power_of_two(distance) || is_power_of_two(all_.size() - distance);
}

// A rank that is known to be dead need not hear it, and keeps nobody else from hearing it. All messages are on their
// way before this waits for any of them, so a rank that does not answer delays no other.
void Alarm::tell(const Bytes& message) noexcept {
  for (int rank = 0; rank < all_.size(); ++rank)
    if (all_.would_see_end_at(rank)) send(rank, message);
  for (const int rank : others_)
    if (is_neighbour(rank) && !all_.would_see_end_at(rank)) send(rank, message);
  all_.drain(kMoment_s);
}

bool Alarm::send(int rank, const Bytes& message) noexcept {
  try {
    all_.post(rank, kTag, message.data(), message.size());
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// The pauses begin short and grow with the wait, since MPI moves on only when it is called.
double Alarm::interval_s(double waited_s) const {
  constexpr double kShortest_s = 50e-6, kLongest_s = 5e-3;
  return std::clamp(waited_s / 8, kShortest_s, kLongest_s);
}

void Alarm::listen() {
  while (all_.has_arrived_from_any(kTag)) {
    const int sender = all_.sender(kTag);
    const auto message = all_.take(sender, kTag, kMostBytes, kMoment_s);
    has_heard_ |= !message;
    if (!message) throw Error(ErrorKind::peer_lost, "a rank has failed, and was gone before it could say why");
    hear(sender, *message);
  }
}

void Alarm::hear(int sender, const Bytes& message) {
  const char first = message.empty() ? kFailure : message.front();
  if (first == kQuestion) {
    send(sender, {kAnswer});
  } else if (first == kAnswer) {
    asked_since_[static_cast<size_t>(sender)] = 0;
  } else {
    const Error error = heard(message, sender);
    // Not `message`, which is as long as the longest one.
    if (!std::exchange(has_heard_, true)) tell(message_of(error.kind(), error.what()));
    throw error;
  }
}

bool Alarm::ask(double waited_s) {
  const double now = now_s();
  if (others_.empty()) return false;
  if (now < next_question_s_) return true;
  next_question_s_ = now + kPause_s;
  size_t asked = 0;
  for (const int rank : others_) {
    if (!all_.is_connected_to(rank)) continue;
    if (++asked > kMostAsked) break;
    double& since = asked_since_[static_cast<size_t>(rank)];
    if (since <= now - waited_s && send(rank, {kQuestion})) since = now;
  }
  return true;
}

std::string Alarm::who_is_stopped(double waited_s) const {
  const double now = now_s();
  std::string text;
  size_t silent = 0;
  double since = now;
  for (const RankName& name : names_) {
    const double asked = asked_since_[static_cast<size_t>(name.rank)];
    if (asked <= now - waited_s || now - asked < kSilence_s) continue;
    if (++silent <= kMostNamed) text += (silent == 1 ? "" : ", ") + to_string(name);
    since = std::min(since, asked);
  }
  if (silent == 0) return "";
  if (silent > kMostNamed) text += " and " + std::to_string(silent - kMostNamed) + " more";
  const bool is_one = silent == 1;
  return text + (is_one ? " has" : " have") + " not answered rank " + std::to_string(all_.rank()) + " for " +
         std::to_string(static_cast<int>(now - since)) + " s: " +
         (is_one ? "its process is stopped, by SIGSTOP or a debugger, or its host or network does not answer; "
                 : "their processes are stopped, by SIGSTOP or a debugger, or their hosts or network do not answer; ");
}

void Alarm::leave_out(const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    others_.erase(std::remove(others_.begin(), others_.end(), rank), others_.end());
    asked_since_[static_cast<size_t>(rank)] = 0;
  }
}

}  // namespace ringtrain
