#include "network/connector.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace ringtrain {
namespace {

// How long who waits for a rank leaves it to that one to dial.
constexpr double kPatience_s = 0.1;
// In which a stranger must have proved that it is none, and how many may try at the same time.
constexpr double kHandshake_s = 5;
constexpr size_t kMostHandshakes = 256;
// A rank whose descriptors are all in use, or that has taken this one for too old a stranger, may answer the next time.
constexpr int kMostDials = 5;

Descriptor spare_descriptor() { return Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace

class Connector::Listener final : public Watched {
 public:
  Listener(Connector& connector, int socket) : connector_(connector), socket_(socket) {}
  void is_ready(uint32_t) override { connector_.accept(socket_.number()); }
  int socket() const { return socket_.number(); }

 private:
  Connector& connector_;
  const Descriptor socket_;
};

class Connector::Beginning final : public Watched {
 public:
  Beginning(Connector& connector, Handshake handshake, int stream)
      : handshake(std::move(handshake)), stream(stream), connector_(connector) {}
  void is_ready(uint32_t) override { connector_.advance(*this); }

  Handshake handshake;
  const int stream;  // of those to this rank, where this one dials
  const double begun_s = now_s();

 private:
  Connector& connector_;
};

Connector::Connector(Poller& poller, Owner& owner, const Credentials& credentials, Directory directory,
                     const std::vector<int>& listeners)
    : poller_(poller),
      owner_(owner),
      credentials_(credentials),
      directory_(std::move(directory)),
      spare_(spare_descriptor()),
      attempts_(directory_.addresses.size()) {
  for (const int socket : listeners) listeners_.push_back(std::make_unique<Listener>(*this, socket));
  for (const auto& listener : listeners_) poller_.add(listener->socket(), *listener, false);
}

Connector::~Connector() = default;

void Connector::accept(int listener) {
  while (true) {
    Descriptor socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket && (errno == EMFILE || errno == ENFILE)) {
      if (!refuse_one(listener)) return;
      continue;
    }
    if (!socket) return;
    if (beginnings_.size() >= kMostHandshakes) end_oldest_stranger();
    prepare_socket(socket.number(), directory_.timeout_s);
    begin(Handshake::answer(std::move(socket), credentials_), 0);
  }
}

// Who comes when there are no descriptors left would wait at the listener, and keep this rank awake. Whether there was
// somebody: without a descriptor the kernel does not even look.
bool Connector::refuse_one(int listener) {
  spare_ = Descriptor();
  Descriptor refused(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  const bool has_come = static_cast<bool>(refused);
  refused = Descriptor();
  spare_ = spare_descriptor();
  if (!spare_) throw failure("no file descriptor is left for the connections between ranks (see ulimit -n)");
  return has_come;
}

void Connector::want(int rank) {
  Attempts& attempts = attempts_[static_cast<size_t>(rank)];
  if (attempts.has_begun || attempts.wanted_at != 0 || owner_.is_connected(rank)) return;
  attempts.wanted_at = now_s() + kPatience_s;
  wanted_.push_back(rank);
}

void Connector::dial(int rank) {
  if (std::exchange(attempts_[static_cast<size_t>(rank)].has_begun, true)) return;
  for (int stream = 0; stream < directory_.streams; ++stream) dial(rank, stream);
}

const SocketAddress& Connector::address_of(int rank, int stream) const {
  const auto& addresses = directory_.addresses[static_cast<size_t>(rank)];
  return addresses[static_cast<size_t>(stream) % addresses.size()];
}

void Connector::dial(int rank, int stream) {
  const SocketAddress& there = address_of(rank, stream);
  Descriptor socket = begin_connection(address_of(credentials_.rank, stream).host, there, directory_.timeout_s);
  if (socket)
    begin(Handshake::dial(std::move(socket), rank, credentials_), stream);
  else
    owner_.is_out_of_reach(rank, to_string(there) + ": " + text_of(errno));
}

void Connector::begin(Handshake handshake, int stream) {
  const auto& it = beginnings_.emplace_back(std::make_unique<Beginning>(*this, std::move(handshake), stream));
  poller_.add(it->handshake.socket(), *it, it->handshake.has_to_write());
}

void Connector::advance(Beginning& it) {
  const Handshake::State state = it.handshake.advance();
  if (state == Handshake::State::under_way)
    return poller_.wait_for_writing(it.handshake.socket(), it, it.handshake.has_to_write());
  const auto place = std::find_if(beginnings_.begin(), beginnings_.end(),
                                  [&](const std::unique_ptr<Beginning>& one) { return one.get() == &it; });
  if (state == Handshake::State::failed) return end(place);
  const int peer = it.handshake.peer(), dialler = it.handshake.dials() ? credentials_.rank : peer;
  Descriptor socket = it.handshake.take();
  poller_.remove(socket.number());
  poller_.bury(std::move(*place));
  beginnings_.erase(place);
  owner_.connected(peer, dialler, std::move(socket));
}

void Connector::end(Beginnings::iterator place) {
  Beginning& it = **place;
  const int peer = it.handshake.peer(), error = it.handshake.error(), stream = it.stream;
  const bool dials = it.handshake.dials();
  poller_.remove(it.handshake.socket());
  poller_.bury(std::move(*place));
  beginnings_.erase(place);
  if (!dials || owner_.is_connected(peer)) return;
  if (error == 0 && ++attempts_[static_cast<size_t>(peer)].failed < kMostDials) return dial(peer, stream);
  const std::string reason = error == 0 ? "it ends the connection at once" : text_of(error);
  owner_.is_out_of_reach(peer, to_string(address_of(peer, stream)) + ": " + reason);
}

void Connector::end_oldest_stranger() {
  const auto oldest =
      std::find_if(beginnings_.begin(), beginnings_.end(), [](const auto& one) { return !one->handshake.dials(); });
  if (oldest != beginnings_.end()) end(oldest);
}

// Who dials waits as long as the other one takes, which may be busy. Who is dialled does not know who that is.
void Connector::look() {
  if (wanted_.empty() && beginnings_.empty()) return;
  const double now = now_s();
  for (const int rank : std::exchange(wanted_, {})) {
    if (owner_.is_connected(rank)) continue;
    if (now < attempts_[static_cast<size_t>(rank)].wanted_at)
      wanted_.push_back(rank);
    else
      dial(rank);
  }
  for (auto one = beginnings_.begin(); one != beginnings_.end();) {
    const auto next = std::next(one);
    if (!(*one)->handshake.dials() && now - (*one)->begun_s > kHandshake_s) end(one);
    one = next;
  }
}

}  // namespace ringtrain
