#include "store/net.h"

#include <errno.h>
#include <pthread.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/fork.h"
#include "kvstore/wire/connection.h"
#include "kvstore/wire/dialler.h"
#include "kvstore/wire/message.h"
#include "memory/shm.h"

namespace ringtrain {
namespace simulation {
namespace {

Net* the_net = nullptr;

}  // namespace

Net::Net(Fibres& fibres, Random& random, Weather weather, int ranks)
    : fibres_(fibres), random_(random), weather_(weather), is_dead_(static_cast<size_t>(ranks)) {
  the_net = this;
}

Net::~Net() { the_net = nullptr; }

Net& Net::current() { return *the_net; }

// ------------------------------------------------------------------------------------------------------------- faults

void Net::cut(int a, int b, double until) {
  cuts_.push_back({a, b, fibres_.now(), until, 0});
  // No host acknowledges data that is sent meanwhile, so the kernel gives up.
  if (until - fibres_.now() <= weather_.timeout_s) return;
  for (size_t i = 0; i < ends_.size(); ++i)
    if (cuts_.back().is_of(ends_[i].rank, end(ends_[i].peer).rank))
      end_at(static_cast<int>(i), fibres_.now() + weather_.timeout_s, ETIMEDOUT);
}

void Net::slow_down(int a, int b, double until, double seconds) {
  slow_.push_back({a, b, fibres_.now(), until, seconds});
}

void Net::reset(int a, int b) {
  const Trouble trouble = {a, b, 0, 0, 0};
  for (size_t i = 0; i < ends_.size(); ++i)
    if (trouble.is_of(ends_[i].rank, end(ends_[i].peer).rank)) {
      ends_[i].inbox.clear();
      end_at(static_cast<int>(i), fibres_.now(), ECONNRESET);
    }
}

void Net::kill(int rank) {
  is_dead_[static_cast<size_t>(rank)] = true;
  listeners_.erase(rank);
  for (size_t i = 0; i < ends_.size(); ++i)
    if (ends_[i].rank == rank) close(static_cast<int>(i));
}

double Net::cut_until(int a, int b) const {
  double until = 0;
  for (const Trouble& one : cuts_)
    if (one.is_of(a, b) && one.until > fibres_.now()) until = std::max(until, one.until);
  return until;
}

bool Net::is_cut(int a, int b) const { return cut_until(a, b) > 0; }

double Net::delay(int a, int b) {
  double seconds = random_.real(weather_.least_s, weather_.most_s);
  for (const Trouble& one : slow_)
    if (one.is_of(a, b) && one.until > fibres_.now()) seconds += random_.real(0, one.seconds);
  return std::max(0.0, cut_until(a, b) - fibres_.now()) + seconds;
}

// -------------------------------------------------------------------------------------------------------- connections

void Net::listen(int port, Poller& poller, Connector::Owner& owner) {
  Listener& listener = listeners_[port];
  listener.poller = &poller;
  listener.owner = &owner;
  for (auto& one : listener.waiting) one(poller, owner);
  listener.waiting.clear();
}

void Net::stop_listening(int port) { listeners_.erase(port); }

void Net::dial(int port, int worker, double timeout_s, Poller& poller, std::function<void(Descriptor, int)> done) {
  const int rank = fibres_.running_rank();
  const auto answer = [this, rank, &poller, done](double at, int socket, int error) {
    fibres_.at(at, [this, rank, &poller, done, socket, error] {
      if (is_dead_[static_cast<size_t>(rank)]) return;
      poller.call([done, socket, error] { done(Descriptor(socket), error); });
    });
  };
  const double cut_s = cut_until(rank, port) - fibres_.now();
  if (cut_s > timeout_s) return answer(fibres_.now() + timeout_s, -1, ETIMEDOUT);
  fibres_.at(fibres_.now() + delay(rank, port), [this, port, worker, rank, answer] {
    const auto found = listeners_.find(port);
    if (found == listeners_.end()) return answer(fibres_.now() + delay(port, rank), -1, ECONNREFUSED);
    const auto accept = [this, port, worker, rank, answer](Poller& at, Connector::Owner& owner) {
      at.call([this, port, worker, rank, answer, &owner] {
        const int near = static_cast<int>(ends_.size()), far = near + 1;
        ends_.emplace_back().rank = rank;
        ends_.emplace_back().rank = port;
        end(near).peer = far;
        end(far).peer = near;
        if (is_dead_[static_cast<size_t>(rank)]) close(near);
        owner.connected(worker, worker, 0, Descriptor(far));
        answer(fibres_.now() + delay(port, rank), near, 0);
      });
    };
    Listener& listener = found->second;
    listener.poller ? accept(*listener.poller, *listener.owner) : listener.waiting.push_back(accept);
  });
}

void Net::end_at(int socket, double at, int error) {
  End& one = end(socket);
  if (one.ends_at <= at) return;
  one.ends_at = at;
  one.error = error;
  fibres_.look_at(at);
}

void Net::close(int socket) {
  End& own = end(socket);
  if (own.is_closed) return;
  own.is_closed = true;
  own.inbox.clear();
  End& other = end(own.peer);
  end_at(own.peer, std::max(other.last_at, fibres_.now() + delay(own.rank, other.rank)), 0);
}

bool Net::is_readable(int socket) const {
  const End& one = end(socket);
  return !one.is_closed &&
         ((!one.inbox.empty() && one.inbox.front().at <= fibres_.now()) || one.ends_at <= fibres_.now());
}

bool Net::is_writable(int socket) const { return end(end(socket).peer).on_the_way < weather_.room_bytes; }

bool Net::write(int socket, const FrameHeader& header, const char* data) {
  const End& own = end(socket);
  End& other = end(own.peer);
  if (other.is_closed || other.ends_at <= fibres_.now()) return true;  // into the void
  if (other.on_the_way >= weather_.room_bytes) return false;
  other.last_at = std::max(other.last_at, fibres_.now() + delay(own.rank, other.rank));
  other.inbox.push_back({other.last_at, header, {data, data + header.bytes}});
  other.on_the_way += sizeof(FrameHeader) + header.bytes;
  fibres_.look_at(other.last_at);
  return true;
}

bool Net::read(int socket, FrameStream::Receiver& receiver, uint64_t& bytes, int& error) {
  while (!end(socket).inbox.empty() && end(socket).inbox.front().at <= fibres_.now()) {
    const Frame frame = std::move(end(socket).inbox.front());
    end(socket).inbox.pop_front();
    end(socket).on_the_way -= sizeof(FrameHeader) + frame.bytes.size();
    bytes += sizeof(FrameHeader) + frame.bytes.size();
    fibres_.look_at(fibres_.now());
    const auto incoming = receiver.place(frame.header);
    if (!incoming) return false;
    if (incoming->place) std::copy(frame.bytes.begin(), frame.bytes.end(), incoming->place);
    incoming->is_complete = true;
    receiver.complete(*incoming);
  }
  const End& own = end(socket);
  if (own.ends_at > fibres_.now()) return true;
  error = own.error;
  return false;
}

}  // namespace simulation

// ---------------------------------------------------------------------------------------------------------- the seams

using simulation::Net;

Descriptor::~Descriptor() {
  if (number_ >= 0) Net::current().close(number_);
}

std::string text_of(int error) { return std::strerror(error); }

void Poller::add(int socket, Watched& watched, bool for_writing) { watched_[socket] = {&watched, for_writing}; }

void Poller::wait_for_writing(int socket, Watched& watched, bool for_writing) { add(socket, watched, for_writing); }

bool Poller::has_work() const {
  if (!calls_.empty()) return true;
  const Net& net = Net::current();
  for (const auto& [socket, interest] : watched_)
    if (net.is_readable(socket) || (interest.for_writing && net.is_writable(socket))) return true;
  return false;
}

void Poller::run() {
  for (const auto& call : std::exchange(calls_, {})) call();
  std::vector<std::pair<int, uint32_t>> ready;
  const Net& net = Net::current();
  for (const auto& [socket, interest] : watched_) {
    const uint32_t events = (net.is_readable(socket) ? uint32_t{EPOLLIN} : 0) |
                            (interest.for_writing && net.is_writable(socket) ? uint32_t{EPOLLOUT} : 0);
    if (events) ready.emplace_back(socket, events);
  }
  for (const auto& [socket, events] : ready)
    if (const auto found = watched_.find(socket); found != watched_.end()) found->second.watched->is_ready(events);
  buried_.clear();
}

bool FrameStream::write() {
  while (!outgoing_.empty()) {
    const OutgoingFrame& frame = *outgoing_.front();
    if (!Net::current().write(socket(), frame.header, frame.data)) return true;
    queued_bytes_ -= sizeof(FrameHeader) + frame.header.bytes;
    sent_bytes_ += sizeof(FrameHeader) + frame.header.bytes;
    outgoing_.pop_front();
  }
  return true;
}

bool FrameStream::read(Receiver& receiver) { return Net::current().read(socket(), receiver, received_bytes_, error_); }

Connector::Connector(Poller& poller, Owner& owner, const Credentials&, const Directory&,
                     std::vector<Descriptor> listeners)
    : port_(listeners.front().port()) {
  Net::current().listen(port_, poller, owner);
}

Connector::~Connector() { Net::current().stop_listening(port_); }

void Dialler::dial(int, const SocketAddress& address, double timeout_s) {
  const auto attempt = std::make_shared<int>();
  attempt_ = attempt;
  Net::current().dial(address.port, credentials_.rank, timeout_s, poller_,
                      [this, attempt](ByteStream bytes, int error) {
                        if (attempt_ != attempt) return;
                        attempt_.reset();
                        error == 0 ? owner_.dialled(std::move(bytes)) : owner_.cannot_dial(error);
                      });
}

namespace {

// By ticket, while somebody has it. Like the kernel's, of all processes.
struct Segments {
  uint64_t last = 0;
  std::map<uint64_t, std::weak_ptr<char>> all;
};

Segments& segments() {
  static Segments one;
  return one;
}

}  // namespace

SharedSegment SharedSegment::create(size_t bytes, size_t) {
  constexpr size_t kPage = 4096;
  Segments& known = segments();
  char* const memory = static_cast<char*>(std::aligned_alloc(kPage, (bytes + kPage - 1) & ~(kPage - 1)));
  std::memset(memory, 0, bytes);
  const std::shared_ptr<char> owned(memory, &std::free);
  for (auto one = known.all.begin(); one != known.all.end();)
    one = one->second.expired() ? known.all.erase(one) : std::next(one);
  known.all[++known.last] = owned;
  return {owned, known.last};
}

// Like the kernel's, by a descriptor of its creator.
SharedSegment SharedSegment::attach(int64_t creator_pid, uint64_t ticket, size_t) {
  if (simulation::Fibres::current().is_killed(static_cast<int>(creator_pid) - kPidOfRank0))
    throw failure("the process that has this memory is dead");
  const std::shared_ptr<char> memory = segments().all[ticket].lock();
  if (!memory) throw failure("nobody has this memory any more");
  return {memory, ticket};
}

namespace {

// The holders of the mutexes of stores, by rank, which may be dead.
std::map<pthread_mutex_t*, int>& holders() {
  static std::map<pthread_mutex_t*, int> all;
  return all;
}

}  // namespace
}  // namespace ringtrain

using ringtrain::simulation::Fibres;

// In place of the robust mutexes of the C library, for which a fibre that is killed would be alive.
extern "C" {

int __wrap_pthread_mutex_init(pthread_mutex_t* mutex, const pthread_mutexattr_t*) {
  ringtrain::holders().erase(mutex);
  return 0;
}

int __wrap_pthread_mutex_trylock(pthread_mutex_t* mutex) {
  const auto [held, is_free] = ringtrain::holders().try_emplace(mutex, Fibres::current().running_rank());
  if (is_free) return 0;
  if (held->second < 0 || !Fibres::current().is_killed(held->second)) return EBUSY;
  held->second = Fibres::current().running_rank();
  return EOWNERDEAD;
}

int __wrap_pthread_mutex_consistent(pthread_mutex_t*) { return 0; }

// The fibres of a rank unwind when it is killed: what they hold stays held.
int __wrap_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  const int rank = Fibres::current().running_rank();
  if (rank < 0 || !Fibres::current().is_killed(rank)) ringtrain::holders().erase(mutex);
  return 0;
}

}  // extern "C"
