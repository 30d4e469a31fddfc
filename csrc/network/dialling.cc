#include "network/dialling.h"

#include <errno.h>

#include <algorithm>
#include <limits>

namespace ringtrain {
namespace {

constexpr double kFirstPause_s = 0.02, kLongestPause_s = 0.5, kLongestAttempt_s = 0.5;

}  // namespace

DialFailure failure_of(int error) {
  switch (error) {
    case ECONNREFUSED:
      return DialFailure::refused;
    case 0:
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
      return DialFailure::turned_away;
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
    case ENOSPC:         // of epoll: too many watches
    case EADDRNOTAVAIL:  // of connect(): all ports of this host are in use
      return DialFailure::no_descriptor;
    default:
      return DialFailure::unreachable;
  }
}

Dialling::Dialling(size_t streams, size_t addresses, double patience_s)
    : patience_s_(patience_s), streams_(streams), addresses_(addresses) {
  for (size_t i = 0; i < streams; ++i) streams_[i].address = i % addresses;
}

std::optional<Dialling::Attempt> Dialling::take_due(double now) {
  for (size_t i = 0; i < streams_.size(); ++i) {
    Stream& stream = streams_[i];
    if (stream.state != State::waiting || stream.due_s > now) continue;
    // Another stream may have found out meanwhile that the address has failed.
    if (addresses_[stream.address]) dial_next_address(stream, now);
    if (stream.state == State::given_up) continue;
    stream.state = State::dialling;
    stream.dialled_at_s = now;
    return Attempt{i, stream.address};
  }
  return std::nullopt;
}

double Dialling::next_due_s() const {
  double next = std::numeric_limits<double>::infinity();
  for (const Stream& stream : streams_)
    if (stream.state == State::waiting) next = std::min(next, stream.due_s);
  return next;
}

void Dialling::has_connected(size_t stream) { streams_[stream].state = State::connected; }

void Dialling::has_failed(size_t number, DialFailure failure, const std::string& reason, double now) {
  Stream& stream = streams_[number];
  const bool is_final = failure == DialFailure::refused || failure == DialFailure::unreachable;
  if (!is_final) {
    const bool is_turned_away = failure == DialFailure::turned_away;
    std::optional<double>& taken_s = is_turned_away ? stream.turned_away_s : stream.no_descriptor_s;
    taken_s = taken_s ? *taken_s + stream.pause_s + std::min(now - stream.dialled_at_s, kLongestAttempt_s) : 0;
    if (patience_s_ == 0 || *taken_s < patience_s_) return dial_again(stream, now);
  }
  if (!addresses_[stream.address]) addresses_[stream.address] = Loss{failure, reason};
  dial_next_address(stream, now);
}

void Dialling::dial_again(Stream& stream, double now) {
  stream.pause_s = stream.pause_s == 0 ? kFirstPause_s : std::min(2 * stream.pause_s, kLongestPause_s);
  stream.state = State::waiting;
  stream.due_s = now + stream.pause_s;
}

void Dialling::dial_next_address(Stream& stream, double now) {
  stream.pause_s = 0;
  stream.turned_away_s = stream.no_descriptor_s = std::nullopt;
  for (size_t i = 1; i <= addresses_.size(); ++i) {
    const size_t next = (stream.address + i) % addresses_.size();
    if (addresses_[next]) continue;
    stream.address = next;
    stream.state = State::waiting;
    stream.due_s = now;
    return;
  }
  stream.state = State::given_up;
}

void Dialling::stop_waiting() {
  for (Stream& stream : streams_)
    if (stream.state == State::waiting) stream.state = State::given_up;
}

bool Dialling::is_out_of_reach() const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const Stream& stream) { return stream.state == State::given_up; });
}

}  // namespace ringtrain
