#include "kvstore/server/server.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "kernels/reduce.h"

namespace ringtrain {
namespace {

uint64_t random_number() {
  uint64_t number = 0;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number)) throw failure("getrandom has failed");
  return number;
}

}  // namespace

ServerThread::ServerThread(ServerShared& shared, int number)
    : shared_(shared), row_(shared.traffic.name + ", thread " + std::to_string(number)) {}

ServerThread::~ServerThread() { stop(); }

void ServerThread::start(MakeConnector listen) {
  if (listen) connector_ = listen(poller_);
  thread_ = start_thread([this] { run(); });
}

void ServerThread::stop() {
  if (!thread_.joinable()) return;
  mailbox_.post([this] { stops_ = true; });
  thread_.join();
}

// A worker has one connection: another one is that of its successor, or its own after the first was broken.
void ServerThread::adopt(int worker, ByteStream bytes) {
  const auto shared_bytes = std::make_shared<ByteStream>(std::move(bytes));
  mailbox_.post([this, worker, shared_bytes] {
    end(worker);
    const uint64_t number = shared_.sessions.fetch_add(1) + 1;
    sessions_[worker] = std::make_unique<Session>(*this, worker, number, std::move(*shared_bytes));
    shared_.connections.fetch_add(1);
    if (shared_.traffic.verbose >= 1)
      inform(shared_.traffic.name + ": worker " + std::to_string(worker) + " has connected");
  });
}

void ServerThread::end_session(int worker) {
  mailbox_.post([this, worker] { end(worker); });
}

void ServerThread::look_at(Part& part, size_t chunk) {
  mailbox_.post([this, &part, chunk] { waiting_room_.try_chunk(part, chunk); });
}

void ServerThread::look_at_all() {
  mailbox_.post([this] { waiting_room_.try_all(); });
}

void ServerThread::has_changed(Part& part, size_t chunk) {
  waiting_room_.try_chunk(part, chunk);
  shared_.tell_others(part, chunk);
  shared_.work.ring();
}

void ServerThread::has_changed() {
  shared_.tell_others_of_all();
  shared_.work.ring();
}

void ServerThread::has_ended(Session& session) {
  if (shared_.traffic.verbose >= 1)
    inform(shared_.traffic.name + ": the connection of worker " + std::to_string(session.worker()) + " has ended");
  end(session.worker());
}

void ServerThread::end(int worker) {
  const auto found = sessions_.find(worker);
  if (found == sessions_.end()) return;
  poller_.bury(found->second->take_connection());
  sessions_.erase(found);
  shared_.connections.fetch_sub(1);
}

// Whether there is something that will not say when it can be done. A connection that fails ends: its worker makes
// another one, and sends again what has no answer.
bool ServerThread::go_on() {
  bool is_busy = false;
  std::vector<int> failed;
  for (const auto& [worker, session] : sessions_) {
    const auto error = error_of([&] {
      is_busy = session->try_again() || is_busy;
      session->flush();
    });
    if (error) failed.push_back(worker);
  }
  for (const int worker : failed) end(worker);
  return is_busy;
}

void ServerThread::take_turn() {
  // A process that dies after a change and before it says so leaves others waiting: they look themselves, too.
  constexpr double kLook_s = 0.1, kBusy_s = 1e-3, kStrangers_s = 2;
  if (waiting_room_.size() > 0 && now_s() - looked_at_ > kLook_s) {
    waiting_room_.try_all();
    looked_at_ = now_s();
  }
  const bool has_finished = shared_.stores.finish_pushes();
  const bool is_busy = go_on();
  waiting_.store(waiting_room_.size(), std::memory_order_relaxed);
  mailbox_.sleep(is_busy ? kBusy_s : waiting_room_.size() > 0 || !has_finished ? kLook_s : kStrangers_s);
}

void ServerThread::run() {
  const KeptDenormals kept;
  GuardedTurns turns(row_);
  looked_at_ = now_s();
  while (true) {
    turns.run([this] { mailbox_.empty(); });
    if (stops_) break;
    turns.run([this] { poller_.run(); });
    if (connector_) turns.run([this] { connector_->look(); });
    turns.run([this] { take_turn(); });
  }
  while (!sessions_.empty()) end(sessions_.begin()->first);
  connector_.reset();
  turns.run([this] { poller_.run(); });
}

StoreServer::StoreServer(ServerOptions options)
    : capacity_(options.capacity),
      credentials_{options.secret, options.token, options.capacity + options.number,
                   options.capacity + options.number + 1},
      shared_(!options.node.empty(), options.timeout_s) {
  shared_.words = {random_number(), getpid(), options.node};
  shared_.traffic.name = "server " + std::to_string(options.number);
  shared_.traffic.verbose = options.verbose;
  shared_.tell_others = [this](Part& part, size_t chunk) {
    if (threads_.size() > 1 && part.has_parked())
      for (const auto& thread : threads_) thread->look_at(part, chunk);
  };
  shared_.tell_others_of_all = [this] { look_at_all(); };
  for (int i = 0; i < std::max(1, options.threads); ++i) threads_.push_back(std::make_unique<ServerThread>(shared_, i));
  PartTable::announce(shared_.words.identity, shared_.stores.table());
  Connector::Owner& owner = *this;
  const auto listen = [this, &owner, &options](Poller& poller) {
    std::vector<std::vector<SocketAddress>> nobody(static_cast<size_t>(credentials_.size));
    return std::make_unique<Connector>(poller, owner, credentials_, Directory{std::move(nobody), 1, options.timeout_s},
                                       std::move(options.listeners));
  };
  for (size_t i = 0; i < threads_.size(); ++i)
    threads_[i]->start(i == 0 ? ServerThread::MakeConnector(listen) : nullptr);
}

StoreServer::~StoreServer() {
  close();
  PartTable::withdraw(shared_.words.identity);
}

void StoreServer::connected(int rank, int, int, ByteStream bytes) {
  if (rank >= capacity_) return;  // another server has nothing to ask for
  threads_[static_cast<size_t>(rank) % threads_.size()]->adopt(rank, std::move(bytes));
}

void StoreServer::require_worker(int worker) const {
  if (worker < 0 || worker >= capacity_) throw invalid("there is no worker " + std::to_string(worker));
}

void StoreServer::lost(int worker, uint32_t first_term) {
  require_worker(worker);
  shared_.stores.admit(worker, first_term);
  threads_[static_cast<size_t>(worker) % threads_.size()]->end_session(worker);
  shared_.stores.set_presence(worker, Presence::gone);
  look_at_all();
}

void StoreServer::left(int worker) {
  require_worker(worker);
  shared_.stores.set_presence(worker, Presence::gone);
  look_at_all();
}

void StoreServer::back(int worker, uint32_t first_term) {
  require_worker(worker);
  shared_.stores.admit(worker, first_term);
  shared_.stores.set_presence(worker, Presence::here);
  look_at_all();
}

void StoreServer::look_at_all() {
  for (const auto& thread : threads_) thread->look_at_all();
}

std::optional<ServerStores::Taken> StoreServer::take(double longest_s) {
  const uint32_t seen = shared_.work.value.load(std::memory_order_acquire);
  if (auto taken = stores().take()) return taken;
  shared_.work.sleep(seen, longest_s);
  return stores().take();
}

void StoreServer::finish(size_t part, size_t piece, const Bytes& weight) {
  stores().finish(part, piece, weight, [this](Part& of_chunk, size_t chunk) {
    if (!of_chunk.has_parked()) return;
    for (const auto& thread : threads_) thread->look_at(of_chunk, chunk);
  });
}

std::map<std::string, double> StoreServer::metrics() const {
  const auto number = [](const std::atomic<uint64_t>& counter) { return static_cast<double>(counter.load()); };
  size_t waiting = 0;
  for (const auto& thread : threads_) waiting += thread->waiting();
  const Traffic& traffic = shared_.traffic;
  return {{"sent_bytes", number(traffic.sent_bytes)},
          {"sent_messages", number(traffic.sent_messages)},
          {"received_bytes", number(traffic.received_bytes)},
          {"received_messages", number(traffic.received_messages)},
          {"connections", static_cast<double>(shared_.connections.load())},
          {"waiting_requests", static_cast<double>(waiting)}};
}

void StoreServer::start_timeline(Timeline::Setup setup) {
  timeline_ = std::make_shared<Timeline>(std::move(setup));
  announce_timeline(timeline_);
}

void StoreServer::close() {
  if (!process_.is_this()) return;
  for (const auto& thread : threads_) thread->stop();
  if (!timeline_) return;
  announce_timeline(nullptr);
  timeline_.reset();
}

}  // namespace ringtrain
