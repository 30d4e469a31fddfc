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
    case EBADMSG:  // bytes were changed on their way: see network/byte_stream.h
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
    : patience_s_(patience_s),
      streams_(streams),
      addresses_(addresses),
      has_answered_(addresses),
      was_tried_(addresses) {
  for (size_t i = 0; i < streams; ++i) streams_[i].own_address = streams_[i].address = i % addresses;
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

void Dialling::has_connected(size_t number) {
  Stream& stream = streams_[number];
  stream.state = State::connected;
  stream.has_been_connected = true;
  has_answered_[stream.address] = true;
}

void Dialling::has_broken(size_t number) {
  if (streams_[number].state == State::connected) streams_[number].state = State::given_up;
}

// An address that has refused before may be behind a firewall: it stays lost.
void Dialling::heal(Missing missing, double until_s, double now) {
  missing_ = missing;
  heals_until_s_ = until_s;
  was_tried_.assign(addresses_.size(), false);
  for (std::optional<Loss>& loss : addresses_)
    if (loss && loss->failure != DialFailure::refused) loss.reset();
  for (Stream& stream : streams_) {
    if (stream.state == State::connected || stream.state == State::dialling) continue;
    const bool is_missing = missing == Missing::all || stream.has_been_connected;
    stream.state = is_missing ? State::waiting : State::given_up;
    stream.address = stream.own_address;
    stream.due_s = now;
    stream.pause_s = 0;
  }
}

void Dialling::give_up(Stream& stream) {
  stream.state = State::given_up;
  if (!addresses_[stream.address]) addresses_[stream.address] = stream.latest;
}

void Dialling::has_failed(size_t number, DialFailure failure, const std::string& reason, double now) {
  Stream& stream = streams_[number];
  if (heals()) return heal_after(stream, failure, reason, now);
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

void Dialling::heal_after(Stream& stream, DialFailure failure, const std::string& reason, double now) {
  stream.latest = Loss{failure, reason};
  was_tried_[stream.address] = true;
  const bool is_refused = failure == DialFailure::refused;
  if (is_refused) addresses_[stream.address] = stream.latest;
  if (is_refused && !has_answered_[stream.address]) return dial_next_address(stream, now);
  if (is_refused) {
    give_up(stream);
    return stop_waiting();
  }
  // The rank was stopped meanwhile.
  const double lasted_s = now - stream.dialled_at_s;
  if (failure == DialFailure::turned_away && lasted_s > kLongestAttempt_s) *heals_until_s_ += lasted_s;
  if (may_give_up(now)) return give_up(stream);
  const double pause_s = stream.pause_s;
  if (missing_ == Missing::all)
    dial_next_address(stream, now);
  else
    stream.address = stream.own_address;
  stream.pause_s = pause_s;
  dial_again(stream, now);
}

bool Dialling::may_give_up(double now) const {
  if (now < *heals_until_s_) return false;
  for (size_t i = 0; i < addresses_.size(); ++i)
    if (!was_tried_[i] && !addresses_[i]) return false;
  return true;
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
