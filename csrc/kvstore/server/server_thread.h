// A thread of a server: it receives from some of the workers, does what they ask, and answers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "kvstore/server/session.h"
#include "kvstore/server/waiting_room.h"
#include "kvstore/wire/mailbox.h"
#include "network/connector.h"

namespace ringtrain {

// What the threads of a server have in common.
struct ServerShared {
  ServerShared(bool shares_memory, double timeout) : stores(shares_memory, timeout), timeout_s(timeout) {}

  ServerStores stores;
  ServerWords words;
  Traffic traffic;
  double timeout_s;
  std::atomic<uint64_t> sessions{0};                          // that there have been
  std::atomic<int64_t> connections{0};                        // that there are
  Flag work;                                                  // rung when the program that updates may have some
  std::function<void(Part& part, size_t chunk)> tell_others;  // what one thread has seen happen to a chunk
  std::function<void()> tell_others_of_all;
};

class ServerThread final : Session::Home {
 public:
  // `shared` outlives this. `number`: of the server's threads.
  ServerThread(ServerShared& shared, int number);
  ~ServerThread() override;

  // Any thread. The first one also takes the connections that come to the server: `listen` makes what does, on it.
  using MakeConnector = std::function<std::unique_ptr<Connector>(Poller& poller)>;
  void start(MakeConnector listen);
  void adopt(int worker, Descriptor socket);
  void end_session(int worker);
  void look_at(Part& part, size_t chunk);
  void look_at_all();
  size_t waiting() const { return waiting_.load(std::memory_order_relaxed); }
  void stop();

 private:
  Poller& poller() override { return poller_; }
  Traffic& traffic() override { return shared_.traffic; }
  ServerStores& stores() override { return shared_.stores; }
  const ServerWords& words() const override { return shared_.words; }
  WaitingRoom& waiting_room() override { return waiting_room_; }
  double timeout_s() const override { return shared_.timeout_s; }
  const std::string& lane() const override { return lane_; }
  void has_changed(Part& part, size_t chunk) override;
  void has_changed() override;
  void has_ended(Session& session) override;

  void run();
  void take_turn();
  void end(int worker);
  bool go_on();

  ServerShared& shared_;
  const std::string lane_;
  Poller poller_;
  Mailbox mailbox_{poller_};
  WaitingRoom waiting_room_;
  std::map<int, std::unique_ptr<Session>> sessions_;  // by worker
  std::unique_ptr<Connector> connector_;
  bool stops_ = false;
  double looked_at_ = 0;  // at all that waits
  std::atomic<size_t> waiting_{0};
  std::thread thread_;
};

}  // namespace ringtrain
