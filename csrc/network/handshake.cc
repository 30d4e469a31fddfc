#include "network/handshake.h"

#include <errno.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <cstring>

#include "base/error.h"
#include "base/log.h"

namespace ringtrain {
namespace {

constexpr char kMagic[8] = {'r', 'i', 'n', 'g', 't', 'r', 'n', 4};  // the last: the version of what follows
constexpr char kWelcome = 'w';
constexpr const char *kDials = "dials", *kAnswers = "answers";

struct Nonce {
  uint8_t bytes[16];
};

struct Hello {
  char magic[8];
  int32_t from, to, stream, is_sealed;
  Nonce nonce;
};

struct Challenge {
  Nonce nonce;
  Sha256 proof;
};

Nonce fresh_nonce() {
  Nonce nonce;
  if (getrandom(nonce.bytes, sizeof(nonce.bytes), 0) != sizeof(nonce.bytes)) throw failure("getrandom has failed");
  return nonce;
}

template <typename Value>
Bytes bytes_of(const Value& value) {
  Writer writer;
  writer.put(value);
  return writer.take();
}

// Says so where it cannot, once.
bool can_seal() {
  static const bool can = [] {
    const auto error = error_of(Sealing::require);
    if (error) warn(std::string("other processes are refused: ") + error->what());
    return !error;
  }();
  return can;
}

}  // namespace

Handshake Handshake::dial(Descriptor socket, int to, int stream, const Credentials& credentials) {
  Handshake handshake(std::move(socket), credentials, true);
  handshake.peer_ = to;
  handshake.stream_ = stream;
  Hello hello{{}, credentials.rank, to, stream, credentials.is_sealed, fresh_nonce()};
  std::memcpy(hello.magic, kMagic, sizeof(kMagic));
  handshake.say(bytes_of(hello));
  handshake.expect(Wait::challenge);
  return handshake;
}

Handshake Handshake::answer(Descriptor socket, const Credentials& credentials) {
  Handshake handshake(std::move(socket), credentials, false);
  handshake.expect(Wait::hello);
  return handshake;
}

Handshake::State Handshake::advance() {
  while (true) {
    while (has_to_write()) {
      const ssize_t sent = ::send(socket(), out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) return stopped(sent);
      sent_ += static_cast<size_t>(sent);
    }
    if (wait_ == Wait::nothing) return State::done;
    while (came_ < in_.size()) {
      const ssize_t came = ::recv(socket(), in_.data() + came_, in_.size() - came_, MSG_DONTWAIT);
      if (came <= 0) return stopped(came);
      came_ += static_cast<size_t>(came);
    }
    if (!take_message()) return State::failed;
  }
}

Handshake::State Handshake::stopped(ssize_t moved) {
  const bool has_to_wait = moved < 0 && (errno == EAGAIN || errno == EINTR || errno == ENOTCONN);
  if (has_to_wait) return State::under_way;
  error_ = moved < 0 ? errno : 0;
  return State::failed;
}

void Handshake::expect(Wait wait) {
  constexpr size_t kBytes[] = {sizeof(Hello), sizeof(Challenge), sizeof(Sha256), sizeof(kWelcome), 0};
  wait_ = wait;
  in_.resize(kBytes[static_cast<size_t>(wait)]);
  came_ = 0;
}

void Handshake::say(const Bytes& message) {
  out_ = message;
  sent_ = 0;
  said_.append(message.begin(), message.end());
}

bool Handshake::take_message() {
  switch (wait_) {
    case Wait::hello:
      return take_hello();
    case Wait::challenge:
      return take_challenge();
    case Wait::proof:
      return take_proof();
    default:
      return take_welcome();
  }
}

bool Handshake::take_hello() {
  const auto hello = Reader(in_).get<Hello>();
  const bool is_meant = std::memcmp(hello.magic, kMagic, sizeof(kMagic)) == 0 && hello.to == credentials_->rank &&
                        hello.from >= 0 && hello.from < credentials_->size && hello.from != credentials_->rank;
  const bool is_too_plain = credentials_->is_sealed && hello.is_sealed == 0;
  if (!is_meant || is_too_plain) return false;
  is_sealed_ = hello.is_sealed != 0;
  if (is_sealed_ && !can_seal()) return false;
  peer_ = hello.from;
  stream_ = hello.stream;
  said_.append(in_.begin(), in_.end());
  const Nonce nonce = fresh_nonce();
  said_.append(reinterpret_cast<const char*>(nonce.bytes), sizeof(nonce.bytes));
  out_ = bytes_of(Challenge{nonce, proof(kAnswers)});
  sent_ = 0;
  expect(Wait::proof);
  return true;
}

bool Handshake::take_challenge() {
  const auto challenge = Reader(in_).get<Challenge>();
  said_.append(reinterpret_cast<const char*>(challenge.nonce.bytes), sizeof(challenge.nonce.bytes));
  if (!are_equal(challenge.proof, proof(kAnswers))) return false;
  out_ = bytes_of(proof(kDials));
  sent_ = 0;
  expect(Wait::welcome);
  return true;
}

bool Handshake::take_proof() {
  if (!are_equal(Reader(in_).get<Sha256>(), proof(kDials))) return false;
  out_ = bytes_of(kWelcome);
  sent_ = 0;
  expect(Wait::nothing);
  return true;
}

bool Handshake::take_welcome() {
  if (in_.front() != kWelcome) return false;
  expect(Wait::nothing);
  return true;
}

ByteStream Handshake::take() {
  const std::string secret = credentials_->secret + credentials_->token;
  return ByteStream(std::move(socket_), is_sealed_ ? std::make_unique<Sealing>(secret, said_, dials_) : nullptr);
}

Sha256 Handshake::proof(const char* of_whom) const {
  return hmac_sha256(credentials_->secret, of_whom + credentials_->token + said_);
}

}  // namespace ringtrain
