#include "network/connector.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace ringtrain {
namespace {

// How long a rank that waits for another one leaves it to that one to dial.
constexpr double kPatience_s = 0.1;
// An attempt to make a connection again gives up early, as the network may be back at any moment.
constexpr double kRedial_s = 1, kShortestRedial_s = 0.25, kNever_s = std::numeric_limits<double>::infinity();
// See connector.h. A rank sends its hello as soon as it is connected, so only a stranger keeps silent.
constexpr double kHello_s = 1, kHandshake_s = 5;
constexpr size_t kMostAnswered = 256;
// Connections that are accepted at a time: a crowd of strangers must not keep the streams of ranks waiting.
constexpr int kMostAtATime = 4;
// How long nobody listens where no file descriptor is left, not even to turn somebody away.
constexpr double kNoDescriptor_s = 0.1;

Descriptor spare_descriptor() { return Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

// Of two addresses of one rank: where one accepts connections only to end them, the process lives, whatever has become
// of the others; where one could not be tried, nobody knows; and where one refuses, the process is gone.
bool tells_more(DialFailure one, DialFailure other) {
  constexpr std::array kOrder = {DialFailure::turned_away, DialFailure::no_descriptor, DialFailure::refused};
  const auto place = [&](DialFailure failure) { return std::find(kOrder.begin(), kOrder.end(), failure); };
  return place(one) < place(other);
}

}  // namespace

class Connector::Listener final : public Watched {
 public:
  Listener(Connector& connector, Descriptor socket) : connector_(connector), socket_(std::move(socket)) {}
  void is_ready(uint32_t) override { connector_.accept(*this); }
  int socket() const { return socket_.number(); }

  bool is_open = false;
  double opens_at_s = 0;  // not before, when it is closed

 private:
  Connector& connector_;
  const Descriptor socket_;
};

class Connector::Beginning final : public Watched {
 public:
  Beginning(Connector& connector, Handshake handshake, Dialling::Attempt attempt)
      : handshake(std::move(handshake)), attempt(attempt), connector_(connector) {}
  void is_ready(uint32_t) override { connector_.advance(*this); }

  double ends_s() const { return begun_s + (handshake.has_heard_hello() ? kHandshake_s : kHello_s); }

  Handshake handshake;
  const Dialling::Attempt attempt;  // where this rank dials
  const double begun_s = now_s();

 private:
  Connector& connector_;
};

Connector::Connector(Poller& poller, Owner& owner, const Credentials& credentials, Directory directory,
                     std::vector<Descriptor> listeners)
    : poller_(poller),
      owner_(owner),
      credentials_(credentials),
      directory_(std::move(directory)),
      spare_(spare_descriptor()),
      peers_(directory_.addresses.size()) {
  for (Descriptor& socket : listeners) listeners_.push_back(std::make_unique<Listener>(*this, std::move(socket)));
  closed_ = listeners_.size();
  listen_again(now_s());
}

Connector::~Connector() = default;

// --------------------------------------------------------------------------------------------------------- answering

// The listener stays ready while connections are left in the kernel's queue.
void Connector::accept(Listener& listener) {
  for (int accepted = 0; answered_ < kMostAnswered; ++accepted) {
    if (accepted == kMostAtATime) return;
    Descriptor socket(accept4(listener.socket(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket)
      answer(std::move(socket));
    else if (errno == EAGAIN || failure_of(errno) != DialFailure::no_descriptor)
      return;
    else if (!refuse_one(listener.socket()))
      break;
  }
  poller_.remove(listener.socket());
  listener.is_open = false;
  listener.opens_at_s = answered_ < kMostAnswered ? now_s() + kNoDescriptor_s : 0;
  ++closed_;
}

// Its hello has usually come already. Nothing that happens to a stranger may end this rank.
void Connector::answer(Descriptor socket) {
  const size_t before = answered_;
  try {
    prepare_socket(socket.number(), directory_.timeout_s);
    Handshake handshake = Handshake::answer(std::move(socket), credentials_);
    begin(std::make_unique<Beginning>(*this, std::move(handshake), Dialling::Attempt{}));
  } catch (const std::exception&) {
    if (answered_ > before) drop(std::prev(beginnings_.end()));
    return;
  }
  advance(*beginnings_.back());
}

// A connection that arrives when the process is out of descriptors is turned away: it would keep this rank awake. Its
// rank dials again. Returns false if there is no connection, or no descriptor to take it with.
bool Connector::refuse_one(int listener) {
  spare_ = Descriptor();
  Descriptor refused(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  const bool has_come = static_cast<bool>(refused);
  refused = Descriptor();
  spare_ = spare_descriptor();
  return has_come && spare_;
}

void Connector::listen_again(double now) {
  if (closed_ == 0 || answered_ >= kMostAnswered) return;
  if (!spare_) spare_ = spare_descriptor();
  for (const auto& listener : listeners_) {
    if (listener->is_open || now < listener->opens_at_s) continue;
    poller_.add(listener->socket(), *listener, false);
    listener->is_open = true;
    --closed_;
  }
}

// Where this rank was stopped, the answer of the other one may have come in time.
void Connector::end_late(double now) {
  for (auto one = beginnings_.begin(); one != beginnings_.end();) {
    const auto next = std::next(one);
    Beginning& beginning = **one;
    if (is_late(beginning, now)) {
      advance(beginning);
      if (place_of(beginning) == one && is_late(beginning, now)) {
        beginning.handshake.give_up(ETIMEDOUT);
        end(one);
      }
    }
    one = next;
  }
}

// On the side that dials: no host has answered an attempt to make a connection again.
bool Connector::is_late(const Beginning& beginning, double now) {
  if (!beginning.handshake.dials()) return now > beginning.ends_s();
  if (beginning.handshake.is_connected()) return false;
  const Dialling& dialling = this->dialling(beginning.handshake.peer());
  return dialling.heals() && now > std::min(beginning.begun_s + kRedial_s,
                                            std::max(dialling.heals_until_s(), beginning.begun_s + kShortestRedial_s));
}

// ---------------------------------------------------------------------------------------------------------- dialling

void Connector::want(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.dialling || peer.wanted_at != 0 || owner_.is_connected(rank)) return;
  peer.wanted_at = now_s() + kPatience_s;
  wanted_.push_back(rank);
}

void Connector::dial(int rank) {
  if (make_dialling(rank)) dial_due(rank, now_s());
}

// Whether there was none.
bool Connector::make_dialling(int rank) {
  const auto place = static_cast<size_t>(rank);
  if (peers_[place].dialling) return false;
  peers_[place].dialling.emplace(static_cast<size_t>(directory_.streams), directory_.addresses[place].size(),
                                 directory_.timeout_s);
  return true;
}

void Connector::has_broken(int rank, int stream) { dialling(rank).has_broken(static_cast<size_t>(stream)); }

void Connector::heal(int rank, Dialling::Missing missing, double until_s) {
  make_dialling(rank);
  const double now = now_s();
  dialling(rank).heal(missing, until_s, now);
  dial_due(rank, now);
}

void Connector::go_on_dialling(int rank, double now) {
  if (owner_.is_over(rank) || (owner_.is_connected(rank) && !dialling(rank).heals()))
    dialling(rank).stop_waiting();
  else
    dial_due(rank, now);
}

void Connector::dial_due(int rank, double now) {
  Dialling& dialling = this->dialling(rank);
  while (const std::optional<Dialling::Attempt> attempt = dialling.take_due(now)) dial(rank, *attempt, now);
  if (dialling.is_out_of_reach()) return owner_.is_out_of_reach(rank, loss_of(rank));
  const bool waits = std::isfinite(dialling.next_due_s());
  if (waits && std::find(waiting_.begin(), waiting_.end(), rank) == waiting_.end()) waiting_.push_back(rank);
}

// Numbers of addresses mean the same interface, or network, on both sides.
const SocketAddress& Connector::address_of(int rank, size_t number) const {
  const auto& addresses = directory_.addresses[static_cast<size_t>(rank)];
  return addresses[number % addresses.size()];
}

void Connector::dial(int rank, Dialling::Attempt attempt, double now) {
  Descriptor socket = begin_connection(address_of(credentials_.rank, attempt.address).host,
                                       address_of(rank, attempt.address), directory_.timeout_s);
  if (!socket) return dialling(rank).has_failed(attempt.stream, failure_of(errno), text_of(errno), now);
  Handshake handshake = Handshake::dial(std::move(socket), rank, static_cast<int>(attempt.stream), credentials_);
  begin(std::make_unique<Beginning>(*this, std::move(handshake), attempt));
}

OutOfReach Connector::loss_of(int rank) const {
  OutOfReach why = {DialFailure::unreachable, ""};
  const Dialling& dialling = *peers_[static_cast<size_t>(rank)].dialling;
  for (size_t number = 0; number < directory_.addresses[static_cast<size_t>(rank)].size(); ++number) {
    const std::optional<Dialling::Loss>& loss = dialling.loss(number);
    if (!loss) continue;
    if (why.details.empty() || tells_more(loss->failure, why.failure)) why.failure = loss->failure;
    why.details += (why.details.empty() ? "" : "; ") + to_string(address_of(rank, number)) + ": " + loss->reason;
  }
  return why;
}

// -------------------------------------------------------------------------------------------------------- handshakes

void Connector::begin(std::unique_ptr<Beginning> beginning) {
  Beginning& it = *beginnings_.emplace_back(std::move(beginning));
  if (!it.handshake.dials()) ++answered_;
  poller_.add(it.handshake.socket(), it, it.handshake.has_to_write());
}

void Connector::advance(Beginning& it) {
  const Handshake::State state = it.handshake.advance();
  if (state == Handshake::State::under_way)
    return poller_.wait_for_writing(it.handshake.socket(), it, it.handshake.has_to_write());
  if (state == Handshake::State::failed) return end(place_of(it));
  const bool dials = it.handshake.dials();
  const int peer = it.handshake.peer(), dialler = dials ? credentials_.rank : peer;
  const int stream = it.handshake.stream();
  if (stream < 0 || stream >= directory_.streams) return end(place_of(it));
  ByteStream bytes = it.handshake.take();
  poller_.remove(bytes.socket());
  drop(place_of(it));
  if (dials) dialling(peer).has_connected(static_cast<size_t>(stream));
  owner_.connected(peer, dialler, stream, std::move(bytes));
  const auto& own = peers_[static_cast<size_t>(peer)].dialling;
  if (own && own->heals() && owner_.is_connected(peer)) heal(peer, Dialling::Missing::connected_before, kNever_s);
}

Connector::Beginnings::iterator Connector::place_of(const Beginning& beginning) {
  return std::find_if(beginnings_.begin(), beginnings_.end(),
                      [&](const std::unique_ptr<Beginning>& one) { return one.get() == &beginning; });
}

void Connector::drop(Beginnings::iterator place) {
  if (!(*place)->handshake.dials()) --answered_;
  poller_.bury(std::move(*place));
  beginnings_.erase(place);
}

void Connector::end(Beginnings::iterator place) {
  const Beginning& it = **place;
  const int peer = it.handshake.peer(), error = it.handshake.error();
  const bool dials = it.handshake.dials(), has_proved_itself = it.handshake.has_proved_itself();
  const size_t stream = it.attempt.stream;
  poller_.remove(it.handshake.socket());
  drop(place);
  if (!dials) return;
  if (has_proved_itself) owner_.failed_before_welcome(peer, error);
  const double now = now_s();
  const DialFailure failure = failure_of(error);
  const bool is_turned_away = failure == DialFailure::turned_away;
  dialling(peer).has_failed(stream, failure, is_turned_away ? "it ends each connection at once" : text_of(error), now);
  go_on_dialling(peer, now);
}

std::vector<ByteStream> Connector::take_proved() {
  std::vector<ByteStream> streams;
  for (const auto& one : beginnings_) {
    if (!one->handshake.has_proved_itself()) continue;
    poller_.remove(one->handshake.socket());
    streams.push_back(one->handshake.take());
  }
  return streams;
}

bool Connector::has_proved_itself_to(int rank) const {
  return std::any_of(beginnings_.begin(), beginnings_.end(), [rank](const std::unique_ptr<Beginning>& one) {
    return one->handshake.has_proved_itself() && one->handshake.peer() == rank;
  });
}

// A rank that dials waits as long as the other one takes, which may be busy. One that answers does not know whom.
void Connector::look() {
  if (wanted_.empty() && beginnings_.empty() && waiting_.empty() && closed_ == 0) return;
  const double now = now_s();
  dial_wanted(now);
  end_late(now);
  listen_again(now);
}

void Connector::dial_wanted(double now) {
  for (const int rank : std::exchange(wanted_, {})) {
    if (owner_.is_connected(rank)) continue;
    if (now < peers_[static_cast<size_t>(rank)].wanted_at)
      wanted_.push_back(rank);
    else
      dial(rank);
  }
  for (const int rank : std::exchange(waiting_, {})) go_on_dialling(rank, now);
}

}  // namespace ringtrain
