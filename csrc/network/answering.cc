#include "network/answering.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/sha256.h"
#include "base/signals.h"
#include "base/wait.h"

namespace ringtrain {
namespace {

const std::string kMagic("ringtrv\x03", 8);
constexpr size_t kNonceBytes = 16, kProofBytes = sizeof(Sha256), kHeadBytes = 8, kMostRequestBytes = 4096;
constexpr double kLimit_s = 2;   // of a connection
constexpr int kMostAtOnce = 16;  // connections; others are closed at once
constexpr char kPlain = 0;

// Ends a connection, whose other side is told nothing.
struct Refused {};

// Bytes over a connection, until the deadline.
class Line {
 public:
  explicit Line(Descriptor socket) : socket_(std::move(socket)) {}

  std::string read(size_t size) {
    std::string data(size, '\0');
    for (size_t came = 0; came < size;)
      came += moved([&] { return ::recv(socket_.number(), &data[came], size - came, MSG_DONTWAIT); }, POLLIN);
    return data;
  }
  void write(const std::string& data) {
    for (size_t sent = 0; sent < data.size();)
      sent +=
          moved([&] { return ::send(socket_.number(), &data[sent], data.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT); },
                POLLOUT);
  }

 private:
  template <typename Move>
  size_t moved(Move move, short events) {
    while (true) {
      const ssize_t bytes = move();
      if (bytes > 0) return static_cast<size_t>(bytes);
      if (bytes == 0 || (errno != EAGAIN && errno != EINTR)) throw Refused();
      const double left_s = deadline_s_ - now_s();
      pollfd waiting = {socket_.number(), events, 0};
      if (left_s <= 0 || ::poll(&waiting, 1, static_cast<int>(1e3 * left_s) + 1) < 0) throw Refused();
    }
  }

  const Descriptor socket_;
  const double deadline_s_ = now_s() + kLimit_s;
};

std::string proof(const std::string& secret, const char* of_whom, const std::string& said) {
  const Sha256 digest = hmac_sha256(secret, of_whom + said);
  return {digest.begin(), digest.end()};
}

void require_proof(Line& line, const std::string& secret) {
  std::string said = line.read(kMagic.size() + kNonceBytes);
  if (said.compare(0, kMagic.size(), kMagic) != 0) throw Refused();
  std::string nonce(kNonceBytes, '\0');
  if (getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) throw Refused();
  said += nonce;
  line.write(nonce + proof(secret, "server", said));
  const std::string given = line.read(kProofBytes);
  Sha256 digest;
  std::copy(given.begin(), given.end(), digest.begin());
  if (!are_equal(digest, hmac_sha256(secret, "rank" + said))) throw Refused();
}

std::string read_request(Line& line) {
  size_t size = 0;
  const std::string head = line.read(kHeadBytes);
  for (const char byte : head) size = size << 8 | static_cast<uint8_t>(byte);
  if (head[0] != kPlain || size > kMostRequestBytes) throw Refused();
  return line.read(size);
}

std::string with_head(const std::string& answer) {
  std::string head(kHeadBytes, '\0');
  for (size_t i = 0; i < sizeof(size_t); ++i)
    head[kHeadBytes - 1 - i] = static_cast<char>(static_cast<uint64_t>(answer.size()) >> 8 * i);
  return head + answer;
}

}  // namespace

// Shared with threads that may outlive the Answering.
struct Answering::State {
  const std::string secret;
  const Answer answer;
  std::atomic<int> under_way{0};
};

Answering::Answering(Descriptor listener, std::string secret, Answer answer)
    : listener_(std::move(listener)),
      wake_(eventfd(0, EFD_CLOEXEC)),
      state_(new State{std::move(secret), std::move(answer)}),
      thread_(wake_ ? start_thread([this] { listen(); }) : throw failure("no descriptor is left to answer with")) {}

Answering::~Answering() {
  const uint64_t one = 1;
  if (::write(wake_.number(), &one, sizeof(one)) == sizeof(one)) thread_.join();
  Waiter::comes_true([this] { return state_->under_way == 0; }, kLimit_s);
}

void Answering::listen() {
  pollfd awaited[] = {{listener_.number(), POLLIN, 0}, {wake_.number(), POLLIN, 0}};
  while (true) {
    ::poll(awaited, 2, -1);
    if (awaited[1].revents) return;
    Descriptor socket(accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && errno != EAGAIN && errno != ECONNABORTED && errno != EINTR) Waiter::nap(2e-3);  // no descriptors
    if (!socket || state_->under_way >= kMostAtOnce) continue;
    ++state_->under_way;
    try {
      start_thread([state = state_, line = std::make_shared<Line>(std::move(socket))] {
        try {
          require_proof(*line, state->secret);
          line->write(with_head(state->answer(read_request(*line))));
        } catch (const Refused&) {
        } catch (const std::exception&) {  // no memory for the answer
        }
        --state->under_way;
      }).detach();
    } catch (const std::system_error&) {  // no more threads
      --state_->under_way;
    }
  }
}

}  // namespace ringtrain
