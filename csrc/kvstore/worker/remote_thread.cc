#include "kvstore/worker/remote_thread.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace ringtrain {

RemoteThread::RemoteThread(std::string name, Traffic& traffic, const RemoteOptions& options,
                           const Credentials& credentials, const std::vector<int>& servers)
    : name_(std::move(name)) {
  for (const int number : servers)
    servers_[number] = std::make_unique<RemoteServer>(poller_, traffic, options, credentials, number);
}

RemoteThread::~RemoteThread() {
  ask_to_end();
  join();
}

void RemoteThread::start() {
  thread_ = start_thread([this] { run(); });
}

void RemoteThread::ask_to_end() {
  if (thread_.joinable()) mailbox_.post([this] { stops_ = true; });
}

void RemoteThread::join() {
  if (thread_.joinable()) thread_.join();
}

void RemoteThread::run() {
  GuardedTurns turns(name_);
  while (true) {
    turns.run([this] { mailbox_.empty(); });
    if (stops_) break;
    turns.run([this] { poller_.run(); });
    turns.run([this] { take_turn(); });
  }
  const Error closed(ErrorKind::shut_down, "the store has been closed");
  for (const auto& [number, server] : servers_) server->close(closed);
  servers_.clear();
  turns.run([this] { poller_.run(); });
}

void RemoteThread::take_turn() {
  double pause_s = 1;
  const double now = now_s();
  for (const auto& [number, server] : servers_) {
    do_with(*server, [&](RemoteServer& there) { there.look(now); });
    pause_s = std::min(pause_s, server->pause_s());
  }
  mailbox_.sleep(pause_s);
}

bool RemoteThread::has_all() const {
  return std::all_of(servers_.begin(), servers_.end(), [](const auto& one) { return one.second->has_all(); });
}

void RemoteThread::say(const Head& head) {
  for (const auto& [number, server] : servers_) do_with(*server, [&](RemoteServer& there) { there.say(head); });
}

}  // namespace ringtrain
