#include "kvstore/server/server_thread.h"

#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "kernels/reduce.h"

namespace ringtrain {

ServerThread::ServerThread(ServerShared& shared, int number)
    : shared_(shared), lane_(shared.traffic.name + ", thread " + std::to_string(number)) {}

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
void ServerThread::adopt(int worker, Descriptor socket) {
  const auto shared_socket = std::make_shared<Descriptor>(std::move(socket));
  mailbox_.post([this, worker, shared_socket] {
    end(worker);
    const uint64_t number = shared_.sessions.fetch_add(1) + 1;
    Session::Home& home = *this;
    sessions_[worker] = std::make_unique<Session>(home, worker, number, std::move(*shared_socket));
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
  const bool is_busy = go_on();
  waiting_.store(waiting_room_.size(), std::memory_order_relaxed);
  mailbox_.sleep(is_busy ? kBusy_s : waiting_room_.size() > 0 ? kLook_s : kStrangers_s);
}

void ServerThread::run() {
  const KeptDenormals kept;
  GuardedTurns turns(lane_);
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

}  // namespace ringtrain
