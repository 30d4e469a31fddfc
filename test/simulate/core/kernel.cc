#include "kernel.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace ringtrain::simulation {
namespace {

constexpr size_t kHello = 40, kProof = 32, kNonce = 16;
constexpr uint64_t kMostCallsAtOnce = 20000;
Kernel* the_kernel = nullptr;

}  // namespace

Kernel& Kernel::current() { return *the_kernel; }

Kernel::Kernel(Story& story, Random& random, Fibres& fibres, int ranks, int interfaces, const Settings& settings,
               const Telling& telling)
    : story_(story),
      random_(random),
      fibres_(fibres),
      settings_(settings),
      telling_(telling),
      hosts_(static_cast<size_t>(ranks)) {
  the_kernel = this;
  for (Host& host : hosts_) {
    host.queues.resize(index(interfaces));
    host.listens.resize(index(interfaces));
    host.refuses.resize(index(interfaces));
    host.is_hidden.resize(index(interfaces));
  }
}

Kernel::~Kernel() { the_kernel = nullptr; }

std::string Kernel::address_of(int rank, int interface) {
  return "10." + std::to_string(rank) + "." + std::to_string(interface) + ".1";
}

bool Kernel::has_an_address(int rank) const {
  const Host& host = hosts_[index(rank)];
  for (size_t i = 0; i < host.refuses.size(); ++i)
    if (!host.refuses[i] && !host.is_hidden[i]) return true;
  return false;
}

bool Kernel::has_all_addresses(int rank) const {
  const Host& host = hosts_[index(rank)];
  const auto is_set = [](bool one) { return one; };
  return std::none_of(host.refuses.begin(), host.refuses.end(), is_set) &&
         std::none_of(host.is_hidden.begin(), host.is_hidden.end(), is_set);
}

// -------------------------------------------------------------------------------------------------------- every call

// Returns false where the caller is dead. Other ranks may run before the call, and time goes on.
bool Kernel::begin_call() {
  const int rank = fibres_.running_rank();
  if (has_ended_ || (rank >= 0 && fibres_.is_killed(rank))) return false;
  ++story_.events;
  if (rank < 0) return true;
  if (fibres_.now() != called_s_) {
    called_s_ = fibres_.now();
    calls_at_once_ = 0;
  }
  if (++calls_at_once_ > kMostCallsAtOnce) {
    story_.find("rank " + std::to_string(rank) + " makes system calls without end");
    fibres_.kill(rank);
    return false;
  }
  const double slow_s = hosts_[index(rank)].pause_s;
  if (slow_s == 0 && !random_.chance(settings_.switches)) return true;
  try {
    fibres_.pause(slow_s == 0 ? random_.real(1e-7, 1e-4) : random_.real(0, slow_s));
  } catch (const Killed&) {  // some callers are noexcept; the next wait throws it again
    return false;
  }
  return true;
}

int Kernel::refuse_call(int error) {
  errno = error;
  return -1;
}

int Kernel::new_descriptor(Entry::Kind kind) {
  const int rank = std::max(0, fibres_.running_rank());
  Host& host = hosts_[index(rank)];
  if (host.held >= host.limit) {
    host.was_short = true;
    return refuse_call(EMFILE);
  }
  ++host.held;
  int place;
  if (free_.empty()) {
    place = static_cast<int>(entries_.size());
    entries_.push_back(std::make_unique<Entry>());
  } else {
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
    place = free_.back();
    free_.pop_back();
  }
  Entry& entry = *entries_[index(place)];
  entry.kind = kind;
  entry.rank = rank;
  return place + kFirstDescriptor;
}

int Kernel::open_file() { return begin_call() ? new_descriptor(Entry::file) : refuse_call(EBADF); }

int Kernel::listen(int rank, int interface) {
  const int descriptor = new_descriptor(Entry::listener);
  Entry& own = entry(descriptor);
  --hosts_[index(own.rank)].held;
  ++hosts_[index(rank)].held;
  own.rank = rank;
  own.interface = interface;
  hosts_[index(rank)].listens[index(interface)] = true;
  return descriptor;
}

int Kernel::close(int descriptor) {
  Entry& own = entry(descriptor);
  if (own.kind == Entry::free) return refuse_call(EBADF);
  if (own.is_listed) {
    auto& listed = own.watcher->listed;
    listed.erase(std::find(listed.begin(), listed.end(), descriptor));
  }
  Host& host = hosts_[index(own.rank)];
  --host.held;
  if (own.kind == Entry::listener) {
    host.listens[index(own.interface)] = false;
    for (Connection* waiting : host.queues[index(own.interface)]) send_reset(*waiting, 0, false);
    host.queues[index(own.interface)].clear();
  }
  if (own.kind == Entry::epoll)
    for (const auto& one : entries_) {
      if (one->watcher != own.own_epoll.get()) continue;
      one->watcher = nullptr;
      one->is_listed = false;
    }
  if (own.kind == Entry::socket) {
    own.connection->sides[own.side].descriptor = -1;
    close_side(*own.connection, own.side);
  }
  own = Entry();
  free_.push_back(descriptor - kFirstDescriptor);
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
  return 0;
}

void Kernel::kill(int rank) {
  hosts_[index(rank)].is_dead = true;
  if (hosts_[index(rank)].has_vanished) return;
  for (size_t place = 0; place < entries_.size(); ++place)
    if (entries_[place]->kind != Entry::free && entries_[place]->kind != Entry::epoll && entries_[place]->rank == rank)
      close(static_cast<int>(place) + kFirstDescriptor);
}

// -------------------------------------------------------------------------------------------------------- connecting

Kernel::Connection& Kernel::new_connection() {
  Connection& connection = *connections_.emplace_back(std::make_unique<Connection>());
  connection.number = static_cast<int>(connections_.size()) - 1;
  return connection;
}

int Kernel::socket() {
  if (!begin_call()) return refuse_call(EBADF);
  const int descriptor = new_descriptor(Entry::socket);
  if (descriptor < 0) return descriptor;
  Entry& own = entry(descriptor);
  own.connection = &new_connection();
  own.connection->sides[0].rank = own.rank;
  own.connection->sides[0].descriptor = descriptor;
  return descriptor;
}

int Kernel::bind(int descriptor, int interface) {
  if (!begin_call()) return refuse_call(EBADF);
  entry(descriptor).connection->interface = interface;
  return 0;
}

int Kernel::set_timeout(int descriptor, double seconds) {
  Entry& own = entry(descriptor);
  if (own.kind != Entry::socket) return refuse_call(EBADF);
  own.connection->sides[own.side].timeout_s = seconds;
  return 0;
}

int Kernel::connect(int descriptor, int to, int interface) {
  if (!begin_call()) return refuse_call(EBADF);
  Connection& connection = *entry(descriptor).connection;
  connection.to = to;
  connection.interface = interface;
  connection.begun_s = fibres_.now();
  happened("dials", connection, 0, index(to));
  try_to_connect(connection);
  return refuse_call(EINPROGRESS);
}

bool Kernel::is_cut(int from, int to, int interface, double since) const {
  if (from == kStranger || to == kStranger) return false;
  if (hosts_[index(from)].has_vanished || hosts_[index(to)].has_vanished) return true;
  return std::any_of(cuts_.begin(), cuts_.end(), [&](const Cut& cut) {
    return cut.from == from && cut.to == to && (cut.interface < 0 || cut.interface == interface) &&
           cut.begin <= fibres_.now() && since < cut.end;
  });
}

double Kernel::whole_at(int from, int to, int interface, double time) const {
  if (from == kStranger || to == kStranger) return time;
  if (hosts_[index(from)].has_vanished || hosts_[index(to)].has_vanished) return kNever;
  for (bool is_new = true; is_new;) {
    is_new = false;
    for (const Cut& cut : cuts_) {
      const bool is_this = cut.from == from && cut.to == to && (cut.interface < 0 || cut.interface == interface);
      if (!is_this || time < cut.begin || time >= cut.end) continue;
      time = cut.end;
      is_new = true;
    }
  }
  return time;
}

bool Kernel::is_cut_now(const Connection& connection) const { return was_cut_since(connection, fibres_.now()); }

bool Kernel::was_cut_since(const Connection& connection, double since) const {
  const int from = connection.sides[0].rank, to = connection.to;
  return is_cut(from, to, connection.interface, since) || is_cut(to, from, connection.interface, since);
}

void Kernel::try_to_connect(Connection& connection) {
  Side& own = connection.sides[0];
  if (own.is_closed || own.is_over || connection.was_answered) return;
  const Host& host = hosts_[index(connection.to)];
  if (host.is_hidden[index(connection.interface)])
    return fibres_.at(fibres_.now() + random_.real(0.001, 3), [&] { fail(connection, 0, EHOSTUNREACH); });
  connection.was_cut |= is_cut_now(connection);
  fibres_.at(fibres_.now() + delay(), [&] { arrive_at_listener(connection); });
  // As Linux sends it again: after 1, 2, 4 ... s.
  const double again = fibres_.now() + (1 << std::min(connection.tries++, 5));
  const double longest_s = own.timeout_s > 0 ? own.timeout_s : 127;
  if (again < connection.begun_s + longest_s) return fibres_.at(again, [&] { try_to_connect(connection); });
  fibres_.at(connection.begun_s + longest_s, [&] {
    if (own.is_connected || own.is_over || own.is_closed) return;
    if (connection.was_cut) out_of_reach_.insert(pair_of(own.rank, connection.to));
    fail(connection, 0, ETIMEDOUT);
  });
}

void Kernel::arrive_at_listener(Connection& connection) {
  Side &dials = connection.sides[0], &answers = connection.sides[1];
  connection.was_cut |= is_cut_now(connection);
  if (dials.is_closed || connection.was_answered || is_cut_now(connection)) return;
  Host& host = hosts_[index(connection.to)];
  if (host.is_dead || !host.listens[index(connection.interface)] || host.refuses[index(connection.interface)])
    return fibres_.at(fibres_.now() + delay(), [&] { fail(connection, 0, ECONNREFUSED); });
  auto& queue = host.queues[index(connection.interface)];
  if (queue.size() >= kBacklog) return;
  connection.was_answered = true;
  answers.rank = connection.to;
  answers.is_connected = true;
  queue.push_back(&connection);
  for (const auto& one : entries_)  // of its listener
    if (one->kind == Entry::listener && one->rank == connection.to && one->interface == connection.interface)
      note(static_cast<int>(&one - entries_.data()) + kFirstDescriptor);
  dials.last_arrival = arrival(connection, 1);
  fibres_.at(dials.last_arrival, [&] {
    if (dials.is_closed || dials.is_over || dials.is_connected) return;
    dials.is_connected = true;
    happened("is connected", connection, 0, index(connection.to));
    note(dials.descriptor);
    if (connection.stranger) hear(connection);
  });
}

int Kernel::accept(int descriptor) {
  if (!begin_call()) return refuse_call(EBADF);
  const int rank = entry(descriptor).rank, interface = entry(descriptor).interface;
  const int accepted = new_descriptor(Entry::socket);  // the kernel does not look before it has one
  if (accepted < 0) return accepted;
  auto& queue = hosts_[index(rank)].queues[index(interface)];
  if (queue.empty()) {
    Entry& unused = entry(accepted);
    --hosts_[index(rank)].held;
    unused = Entry();
    free_.push_back(accepted - kFirstDescriptor);
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
    return refuse_call(EAGAIN);
  }
  Entry& own = entry(accepted);
  own.connection = queue.front();
  own.side = 1;
  queue.pop_front();
  own.connection->sides[1].descriptor = accepted;
  happened("accepts", *own.connection, 1, index(own.connection->sides[0].rank + 1));
  return accepted;
}

// ------------------------------------------------------------------------------------------------------------ bytes

// When a packet that one side sends now comes to the other one.
double Kernel::arrival(const Connection& connection, int from_side) {
  if (connection.is_forgotten) return kNever;
  const int from = connection.sides[from_side].rank, to = connection.sides[1 - from_side].rank;
  const double now = fibres_.now(), whole = whole_at(from, to, connection.interface, now);
  // Packets are sent again after pauses that grow.
  const double sent = whole == now ? now : whole + random_.real(0, std::min(whole - now, 0.5));
  return sent + delay();
}

void Kernel::send_bytes(Connection& connection, int to_side, const char* bytes, size_t count) {
  Side& to = connection.sides[to_side];
  to.bytes.append(bytes, count);
  for (size_t left = count; left > 0;) {
    const size_t part = std::min(left, static_cast<size_t>(1 + random_.below(settings_.segment_bytes)));
    left -= part;
    const size_t upto = to.bytes.size() - left - to.read;
    to.last_arrival = std::max(to.last_arrival, arrival(connection, 1 - to_side));
    const uint64_t place = to.received + upto;
    if (to.last_arrival < kNever)
      fibres_.at(to.last_arrival, [this, &connection, to_side, place] { arrive(connection, to_side, place); });
  }
}

// `upto`: of all bytes that were ever sent.
void Kernel::arrive(Connection& connection, int side, size_t upto) {
  Side& own = connection.sides[side];
  if (own.is_over || (own.rank != kStranger && hosts_[index(own.rank)].has_vanished)) return;
  if (connection.is_forgotten) return;
  if (own.is_closed) {
    // Data for somebody who has closed.
    send_reset(connection, 1 - side, false);
    return;
  }
  const size_t arrived = std::min(own.bytes.size(), static_cast<size_t>(upto - own.received) + own.read);
  if (arrived <= own.arrived) return;
  ++story_.events;
  own.arrived_s = fibres_.now();
  own.arrived = arrived;
  note(own.descriptor);
  if (own.rank == kStranger && connection.stranger) hear(connection);
}

ssize_t Kernel::send(int descriptor, const iovec* parts, size_t count) {
  if (!begin_call()) return refuse_call(EBADF);
  const Entry& own = entry(descriptor);
  if (own.kind != Entry::socket) return refuse_call(EBADF);
  Connection& connection = *own.connection;
  Side &side = connection.sides[own.side], &other = connection.sides[1 - own.side];
  if (side.error != 0) return refuse_call(std::exchange(side.error, 0));
  if (side.is_over || other.will_end) return refuse_call(EPIPE);
  if (!side.is_connected) return refuse_call(EAGAIN);
  const size_t pending = other.bytes.size() - other.read;
  size_t room = settings_.window_bytes - std::min(pending, settings_.window_bytes), sent = 0;
  size_t asked = 0;
  for (size_t i = 0; i < count; ++i) asked += parts[i].iov_len;
  if (asked > room) wait_for_room(connection, own.side);
  if (room == 0) return refuse_call(EAGAIN);
  for (size_t i = 0; i < count && room > 0; ++i) {
    const size_t part = std::min(room, parts[i].iov_len);
    if (own.side == 0 && !connection.stranger && connection.begin.size() < kHello + kProof) {
      connection.begin.append(static_cast<const char*>(parts[i].iov_base), part);
      if (connection.begin.size() >= kHello + kProof) overheard_[connection.to] = connection.begin;
    }
    std::string bytes(static_cast<const char*>(parts[i].iov_base), part);
    const auto ranks = pair_of(connection.sides[0].rank, connection.sides[1].rank);
    if (part > 0 && spoilt_.erase(ranks) > 0) {
      bytes[static_cast<size_t>(random_.below(static_cast<int>(part)))] ^= 1 << random_.below(8);
      reset_.insert(ranks);
    }
    send_bytes(connection, 1 - own.side, bytes.data(), part);
    room -= part;
    sent += part;
  }
  happened("sends", connection, own.side, sent);
  return static_cast<ssize_t>(sent);
}

// A window that stays closed is for Linux as good as packets that are not acknowledged.
void Kernel::wait_for_room(Connection& connection, int side) {
  Side &own = connection.sides[side], &other = connection.sides[1 - side];
  if (other.is_full) return;
  other.is_full = true;
  other.full_since = fibres_.now();
  if (own.timeout_s == 0 || own.rank == kStranger || other.rank == kStranger) return;
  fibres_.at(other.full_since + own.timeout_s, [this, &connection, side, since = other.full_since] {
    const Side &writer = connection.sides[side], &reader = connection.sides[1 - side];
    if (!reader.is_full || reader.full_since != since || writer.is_over || writer.is_closed) return;
    const bool was_cut = was_cut_since(connection, since);
    const bool is_slow = hosts_[index(reader.rank)].pause_s > 0;
    if (was_cut || is_slow || fibres_.was_stopped_since(reader.rank, since))
      out_of_reach_.insert(pair_of(reader.rank, writer.rank));
    fail(connection, side, ETIMEDOUT);
    send_reset(connection, 1 - side, false);
  });
}

ssize_t Kernel::receive(int descriptor, const iovec* parts, size_t count) {
  if (!begin_call()) return refuse_call(EBADF);
  const Entry& own = entry(descriptor);
  if (own.kind != Entry::socket) return refuse_call(EBADF);
  Connection& connection = *own.connection;
  Side& side = connection.sides[own.side];
  size_t there = side.arrived - side.read;
  if (there == 0) {
    if (side.error != 0) return refuse_call(std::exchange(side.error, 0));
    if (side.is_over || side.has_ended) return 0;
    return refuse_call(EAGAIN);
  }
  if (there > 1 && random_.chance(settings_.short_reads))
    there = static_cast<size_t>(1 + random_.below(static_cast<int>(there)));
  size_t came = 0;
  for (size_t i = 0; i < count && came < there; ++i) {
    const size_t part = std::min(there - came, parts[i].iov_len);
    std::memcpy(parts[i].iov_base, side.bytes.data() + side.read, part);
    side.read += part;
    side.received += part;
    came += part;
  }
  if (side.read == side.bytes.size()) {
    side.bytes.clear();
    side.read = side.arrived = 0;
  }
  side.is_full = false;
  note(connection.sides[1 - own.side].descriptor);
  happened("receives", connection, own.side, came);
  return static_cast<ssize_t>(came);
}

// -------------------------------------------------------------------------------------------------------------- ends

int Kernel::shut_down(int descriptor) {
  if (!begin_call()) return refuse_call(EBADF);
  const Entry& own = entry(descriptor);
  if (own.kind != Entry::socket) return refuse_call(EBADF);
  Side& side = own.connection->sides[own.side];
  side.has_shut_down = true;
  side.came_before_shut_down = side.received + (side.arrived - side.read);
  send_end(*own.connection, 1 - own.side);
  return 0;
}

void Kernel::send_end(Connection& connection, int to_side) {
  Side& to = connection.sides[to_side];
  if (to.will_end || to.is_over || !connection.was_answered) return;
  to.will_end = true;
  to.last_arrival = std::max(to.last_arrival, arrival(connection, 1 - to_side));
  if (to.last_arrival == kNever) return;
  fibres_.at(to.last_arrival, [this, &connection, to_side] {
    Side& side = connection.sides[to_side];
    if (side.is_over || side.is_closed) return;
    happened("hears the end", connection, to_side, 0);
    side.has_ended = true;
    note(side.descriptor);
  });
}

// Where it overtakes, what was sent before it is lost.
void Kernel::send_reset(Connection& connection, int to_side, bool may_overtake) {
  Side& to = connection.sides[to_side];
  if (to.is_over) return;
  const double arrives = arrival(connection, 1 - to_side);
  const bool overtakes = may_overtake && random_.chance(settings_.losses);
  if (!overtakes) to.last_arrival = std::max(to.last_arrival, arrives);
  const double at = overtakes ? arrives : to.last_arrival;
  if (at == kNever) return;
  fibres_.at(at, [this, &connection, to_side] { fail(connection, to_side, ECONNRESET); });
}

// From now on the side has what has arrived, and the error.
void Kernel::fail(Connection& connection, int side, int error) {
  Side& own = connection.sides[side];
  if (own.is_over || own.is_closed) return;
  happened(error == ECONNRESET ? "is reset" : error == ECONNREFUSED ? "is refused" : "times out", connection, side, 0);
  own.is_over = true;
  own.error = error;
  note(own.descriptor);
}

void Kernel::close_side(Connection& connection, int side) {
  Side& own = connection.sides[side];
  if (std::exchange(own.is_closed, true) || !connection.was_answered || own.is_over) return;
  // Data that arrives between the last read and this is not an error.
  const bool has_ignored_some = !own.has_shut_down || own.received < own.came_before_shut_down;
  if (own.arrived > own.read)
    send_reset(connection, 1 - side, has_ignored_some);
  else
    send_end(connection, 1 - side);
}

void Kernel::cut(int from, int to, int interface, double begin, double end) {
  cuts_.push_back({from, to, interface, begin, end});
  fibres_.at(begin, [this, cut = cuts_.back()] { end_late(cut); });
}

void Kernel::vanish(int rank) {
  hosts_[index(rank)].has_vanished = true;
  for (size_t other = 0; other < hosts_.size(); ++other)
    if (static_cast<int>(other) != rank) cut(rank, static_cast<int>(other), -1, fibres_.now(), kNever);
}

// Connections over a link that stays cut end on both sides, each by its own time.
void Kernel::end_late(const Cut& cut) {
  for (const auto& one : connections_) {
    Connection& connection = *one;
    const bool is_of_these = pair_of(connection.sides[0].rank, connection.sides[1].rank) == pair_of(cut.from, cut.to);
    if (!is_of_these || (cut.interface >= 0 && cut.interface != connection.interface)) continue;
    for (int side = 0; side < 2; ++side) {
      const Side& own = connection.sides[side];
      const double over = fibres_.now() + own.timeout_s * random_.real(1, 1.25);
      if (own.timeout_s == 0 || over >= cut.end || own.is_closed || own.is_over) continue;
      fibres_.at(over, [this, &connection, side, cut] {
        if (connection.sides[side].is_over || connection.sides[side].is_closed) return;
        out_of_reach_.insert(pair_of(cut.from, cut.to));
        fail(connection, side, ETIMEDOUT);
        send_reset(connection, 1 - side, true);
      });
    }
  }
}

void Kernel::reset(int rank, int other, double probability) {
  for (const auto& one : connections_) {
    Connection& connection = *one;
    if (pair_of(connection.sides[0].rank, connection.sides[1].rank) != pair_of(rank, other)) continue;
    if (!connection.was_answered || !random_.chance(probability)) continue;
    if (connection.sides[0].is_closed && connection.sides[1].is_closed) continue;
    reset_.insert(pair_of(rank, other));
    for (int side = 0; side < 2; ++side) fail(connection, side, ECONNRESET);
  }
}

// A connection that a router forgets: nothing arrives on it any more, and its ends know it when their time is over.
void Kernel::forget(int rank, int other, double probability) {
  for (const auto& one : connections_) {
    Connection& connection = *one;
    if (pair_of(connection.sides[0].rank, connection.sides[1].rank) != pair_of(rank, other)) continue;
    if (!connection.was_answered || !random_.chance(probability)) continue;
    connection.is_forgotten = true;
    reset_.insert(pair_of(rank, other));
    constexpr size_t kWelcomed = 49;  // bytes that the dialling side gets first
    const bool is_made = connection.sides[0].received >= kWelcomed;
    for (int side = 0; side < 2; ++side) {
      const double timeout_s = connection.sides[side].timeout_s;
      if (timeout_s == 0) continue;
      fibres_.at(fibres_.now() + timeout_s * random_.real(1, 1.25), [this, &connection, side, is_made] {
        if (!is_made) out_of_reach_.insert(pair_of(connection.sides[0].rank, connection.to));
        fail(connection, side, ETIMEDOUT);
      });
    }
  }
}

Kernel::Answers Kernel::answers_on(int descriptor) {
  if (!begin_call()) return {};
  const Entry& own = entry(descriptor);
  const Side &side = own.connection->sides[own.side], &other = own.connection->sides[1 - own.side];
  return {other.bytes.size() > other.arrived, fibres_.now() - std::max(side.arrived_s, other.arrived_s)};
}

// -------------------------------------------------------------------------------------------------------- strangers

void Kernel::begin_stranger(const Stranger& stranger) {
  Connection& connection = new_connection();
  connection.stranger = std::make_unique<Stranger>(stranger);
  connection.to = stranger.rank;
  connection.interface = random_.below(static_cast<int>(hosts_[0].listens.size()));
  connection.begun_s = fibres_.now();
  try_to_connect(connection);
  fibres_.at(fibres_.now() + stranger.lasts_s, [this, &connection] { close_side(connection, 0); });
}

// When it is connected, and when something has come.
void Kernel::hear(Connection& connection) {
  Side& own = connection.sides[0];
  if (own.is_closed || own.is_over) return;
  const Stranger::Kind kind = connection.stranger->kind;
  const auto say = [&](const std::string& text) { send_bytes(connection, 1, text.data(), text.size()); };
  const size_t there = own.arrived;
  if (there > kNonce + kProof) return story_.find("rank " + std::to_string(connection.to) + " welcomes a stranger");
  if (there == 0) {
    std::string hello = overheard_.count(connection.to) ? overheard_[connection.to].substr(0, kHello) : "";
    if (hello.empty()) {
      const int32_t ends[] = {connection.to == 0 ? 1 : 0, connection.to};
      hello = std::string("ringtrn\4") + std::string(reinterpret_cast<const char*>(ends), sizeof(ends));
      hello.resize(kHello, 'n');
    }
    if (kind == Stranger::hangs_up) return close_side(connection, 0);
    if (kind == Stranger::garbage) return say(std::string(static_cast<size_t>(1 + random_.below(200)), 'x'));
    if (kind == Stranger::half_hello) return say(hello.substr(0, 20));
    if (kind != Stranger::silent) say(hello);
    return;
  }
  if (there < kNonce + kProof) return;
  // A message that must not be taken follows the proof.
  const uint32_t header[] = {1, 0, 8, 0};
  const std::string forged = std::string(reinterpret_cast<const char*>(header), sizeof(header)) + "FORGED!!";
  std::string proof(kProof, 'p');
  if (kind == Stranger::reflected_proof) proof = own.bytes.substr(kNonce, kProof);
  if (kind == Stranger::replayed_proof && overheard_.count(connection.to))
    proof = overheard_[connection.to].substr(kHello, kProof);
  say(proof + forged);
}

// ------------------------------------------------------------------------------------------------------------- epoll

int Kernel::open_epoll() {
  if (!begin_call()) return refuse_call(EBADF);
  const int descriptor = new_descriptor(Entry::epoll);
  if (descriptor >= 0) entry(descriptor).own_epoll = std::make_unique<Epoll>();
  return descriptor;
}

uint32_t Kernel::ready_for(const Entry& entry) const {
  if (entry.kind == Entry::listener)
    return hosts_[index(entry.rank)].queues[index(entry.interface)].empty() ? 0 : EPOLLIN;
  const Side &own = entry.connection->sides[entry.side], &other = entry.connection->sides[1 - entry.side];
  uint32_t events = 0;
  if (own.is_over) events |= EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP;
  if (own.arrived > own.read || own.has_ended) events |= EPOLLIN;
  if (own.is_connected && other.bytes.size() - other.read < settings_.window_bytes) events |= EPOLLOUT;
  return events & (entry.interest | EPOLLERR | EPOLLHUP);
}

void Kernel::note(int descriptor) {
  if (descriptor < 0) return;
  Entry& own = entry(descriptor);
  if (!own.watcher || own.is_listed || ready_for(own) == 0) return;
  own.is_listed = true;
  own.watcher->listed.push_back(descriptor);
}

int Kernel::control(int epoll, int operation, int descriptor, const epoll_event* event) {
  if (!begin_call()) return refuse_call(EBADF);
  Entry& own = entry(descriptor);
  if (own.kind == Entry::free) return refuse_call(EBADF);
  if (operation == EPOLL_CTL_DEL) {
    if (own.is_listed) {
      auto& listed = own.watcher->listed;
      listed.erase(std::find(listed.begin(), listed.end(), descriptor));
    }
    own.is_listed = false;
    own.watcher = nullptr;
    return 0;
  }
  own.watcher = entry(epoll).own_epoll.get();
  own.interest = event->events;
  own.data = event->data;
  note(descriptor);
  return 0;
}

bool Kernel::has_ready(Epoll& epoll) {
  while (!epoll.listed.empty()) {
    Entry& last = entry(epoll.listed.back());
    if (ready_for(last) != 0) return true;
    last.is_listed = false;
    epoll.listed.pop_back();
  }
  return false;
}

int Kernel::take_events(int epoll, epoll_event* events, int most) {
  if (!begin_call()) return refuse_call(EBADF);
  Epoll& own = *entry(epoll).own_epoll;
  if (own.listed.empty()) return 0;
  if (own.listed.size() > 1) random_.shuffle(own.listed);
  int count = 0;
  size_t kept = 0;
  for (const int descriptor : own.listed) {
    Entry& one = entry(descriptor);
    const uint32_t ready = ready_for(one);
    if (ready == 0) {
      one.is_listed = false;
      continue;
    }
    own.listed[kept++] = descriptor;  // it is level-triggered
    if (count == most) continue;
    events[count].events = ready;
    events[count++].data = one.data;
  }
  own.listed.resize(kept);
  return count;
}

int Kernel::wait_for(int epoll, double longest_s) {
  if (!begin_call()) fibres_.wait(nullptr);  // throws Killed
  Epoll& own = *entry(epoll).own_epoll;
  fibres_.wait([&] { return has_ready(own); }, fibres_.now() + longest_s);
  return has_ready(own) ? 1 : 0;
}

void Kernel::sleep(double seconds) {
  if (!begin_call()) return;
  try {
    fibres_.pause(seconds);
  } catch (const Killed&) {
  }
}

void Kernel::fill_randomly(void* bytes, size_t count) {
  for (size_t i = 0; i < count; i += 8) {
    const uint64_t next = random_.next();
    std::memcpy(static_cast<char*>(bytes) + i, &next, std::min(count - i, sizeof(next)));
  }
}

void Kernel::happened(const char* what, const Connection& connection, int side, uint64_t number) {
  story_.mix(static_cast<uint64_t>(connection.number) * 2 + static_cast<uint64_t>(side) + number * 4096);
  if (!telling_.trace || connection.sides[side].rank == kStranger) return;
  const int other = side == 1 ? connection.sides[0].rank : connection.to;
  const std::string peer = other == kStranger ? "a stranger" : "rank " + std::to_string(other);
  const bool has_bytes = !std::strcmp(what, "sends") || !std::strcmp(what, "receives");
  std::printf("%12.6f  rank %-3d %-7s connection %d with %s: %s", fibres_.now(), connection.sides[side].rank, "socket",
              connection.number, peer.c_str(), what);
  std::printf(has_bytes ? " %llu bytes\n" : "\n", static_cast<unsigned long long>(number));
}

}  // namespace ringtrain::simulation

// --------------------------------------------------------------------------------------------------- for the linker

using ringtrain::simulation::Kernel;

namespace {

// 10.RANK.INTERFACE.1
int part_of(const sockaddr* address, int place) {
  uint8_t bytes[4];
  std::memcpy(bytes, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, sizeof(bytes));
  return bytes[place];
}

}  // namespace

extern "C" {

int __wrap_socket(int, int, int) { return Kernel::current().socket(); }
int __wrap_bind(int descriptor, const sockaddr* address, socklen_t) {
  return Kernel::current().bind(descriptor, part_of(address, 2));
}
int __wrap_connect(int descriptor, const sockaddr* address, socklen_t) {
  return Kernel::current().connect(descriptor, part_of(address, 1), part_of(address, 2));
}
int __wrap_accept4(int descriptor, sockaddr*, socklen_t*, int) { return Kernel::current().accept(descriptor); }
int __wrap_setsockopt(int descriptor, int level, int option, const void* value, socklen_t) {
  if (level != IPPROTO_TCP || option != TCP_USER_TIMEOUT) return 0;
  return Kernel::current().set_timeout(descriptor, *static_cast<const int*>(value) / 1e3);
}
int __wrap_getsockopt(int descriptor, int, int, void* value, socklen_t*) {
  const Kernel::Answers answers = Kernel::current().answers_on(descriptor);
  auto* const info = static_cast<tcp_info*>(value);
  info->tcpi_unacked = answers.is_owed ? 1 : 0;
  info->tcpi_last_ack_recv = info->tcpi_last_data_recv = static_cast<uint32_t>(1e3 * answers.last_s_ago);
  return 0;
}
ssize_t __wrap_sendmsg(int descriptor, const msghdr* message, int) {
  return Kernel::current().send(descriptor, message->msg_iov, message->msg_iovlen);
}
ssize_t __wrap_send(int descriptor, const void* bytes, size_t count, int) {
  const iovec part = {const_cast<void*>(bytes), count};
  return Kernel::current().send(descriptor, &part, 1);
}
ssize_t __wrap_readv(int descriptor, const iovec* parts, int count) {
  return Kernel::current().receive(descriptor, parts, static_cast<size_t>(count));
}
ssize_t __wrap_recv(int descriptor, void* bytes, size_t count, int) {
  const iovec part = {bytes, count};
  return Kernel::current().receive(descriptor, &part, 1);
}
int __wrap_shutdown(int descriptor, int) { return Kernel::current().shut_down(descriptor); }
int __real_close(int descriptor);
// A thread has an event of the system to sleep on, which nobody rings here: there are no other threads.
int __wrap_close(int descriptor) {
  return Kernel::has(descriptor) ? Kernel::current().close(descriptor) : __real_close(descriptor);
}
int __wrap_open(const char*, int, ...) { return Kernel::current().open_file(); }
int __wrap_epoll_create1(int) { return Kernel::current().open_epoll(); }
int __wrap_epoll_ctl(int epoll, int operation, int descriptor, epoll_event* event) {
  return Kernel::current().control(epoll, operation, descriptor, event);
}
int __wrap_epoll_wait(int epoll, epoll_event* events, int most, int) {
  return Kernel::current().take_events(epoll, events, most);
}
int __wrap_ppoll(struct pollfd* polled, unsigned long, const timespec* longest, const void*) {
  return Kernel::current().wait_for(*reinterpret_cast<int*>(polled), static_cast<double>(longest->tv_sec) +
                                                                         1e-9 * static_cast<double>(longest->tv_nsec));
}
int __wrap_nanosleep(const timespec* time, timespec*) {
  Kernel::current().sleep(static_cast<double>(time->tv_sec) + 1e-9 * static_cast<double>(time->tv_nsec));
  return 0;
}
ssize_t __wrap_getrandom(void* bytes, size_t count, unsigned) {
  Kernel::current().fill_randomly(bytes, count);
  return static_cast<ssize_t>(count);
}
// Addresses in numbers only.
int __wrap_getaddrinfo(const char* host, const char* port, const addrinfo*, addrinfo** found) {
  auto* const made = static_cast<addrinfo*>(std::calloc(1, sizeof(addrinfo) + sizeof(sockaddr_in)));
  auto* const address = reinterpret_cast<sockaddr_in*>(made + 1);
  uint8_t bytes[4] = {};
  for (int i = 0; i < 4; ++i, host += *host == '.')
    bytes[i] = static_cast<uint8_t>(std::strtol(host, const_cast<char**>(&host), 10));
  address->sin_family = AF_INET;
  address->sin_port = htons(static_cast<uint16_t>(std::atoi(port)));
  std::memcpy(&address->sin_addr, bytes, sizeof(bytes));
  made->ai_family = AF_INET;
  made->ai_addrlen = sizeof(sockaddr_in);
  made->ai_addr = reinterpret_cast<sockaddr*>(address);
  *found = made;
  return 0;
}
void __wrap_freeaddrinfo(addrinfo* made) { std::free(made); }

}  // extern "C"
