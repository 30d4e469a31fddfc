// A server of key-value stores: threads that keep values, update them with what workers push, and give them out. In a
// process of its own or in a worker's.
//
// Workers that share memory with it come only to ask for that: they update the values themselves.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/fork.h"
#include "base/signals.h"
#include "kvstore/server/session.h"
#include "kvstore/wire/mailbox.h"
#include "network/connector.h"
#include "network/handshake.h"
#include "record/timeline.h"

namespace ringtrain {

// State that all threads of a server use.
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

// A thread of a server: it receives from some of the workers, does what they ask, and answers.
class ServerThread {
 public:
  // `shared` outlives this. `number`: of the server's threads.
  ServerThread(ServerShared& shared, int number);
  ~ServerThread();

  // Any thread. The first one also takes the connections that come to the server: `listen` makes what does, on it.
  using MakeConnector = std::function<std::unique_ptr<Connector>(Poller& poller)>;
  void start(MakeConnector listen);
  void adopt(int worker, ByteStream bytes);
  void end_session(int worker);
  void look_at(Part& part, size_t chunk);
  void look_at_all();
  size_t waiting() const { return waiting_.load(std::memory_order_relaxed); }
  void stop();

  // On this thread, by its Sessions.
  Poller& poller() { return poller_; }
  ServerShared& shared() { return shared_; }
  WaitingRoom& waiting_room() { return waiting_room_; }
  const std::string& row() const { return row_; }  // its track in timelines
  // Something that others may wait for has happened to a chunk; or to any.
  void has_changed(Part& part, size_t chunk);
  void has_changed();
  void has_ended(Session& session);

 private:
  void run();
  void take_turn();
  void end(int worker);
  bool go_on();

  ServerShared& shared_;
  const std::string row_;
  Poller poller_;
  Mailbox mailbox_{poller_};
  WaitingRoom waiting_room_;
  std::map<int, std::unique_ptr<Session>> sessions_;  // by worker
  std::unique_ptr<Connector> connector_;
  bool stops_ = false;
  double looked_at_ = 0;  // at all that waits
  std::atomic<size_t> waiting_{0};
  Thread thread_;
};

struct ServerOptions {
  int number = 0, capacity = 1;       // of this server; how many workers there may be
  std::vector<Descriptor> listeners;  // sockets that do not block
  std::string secret, token;          // see Credentials
  int threads = 1;
  std::string node;  // equal in processes that may share memory; empty: it shares none
  double timeout_s = 30;
  int verbose = 0;
};

// Any thread.
class StoreServer final : Connector::Owner {
 public:
  explicit StoreServer(ServerOptions options);
  ~StoreServer() override;

  ServerStores& stores() { return shared_.stores; }
  const ServerWords& words() const { return shared_.words; }

  // A worker is dead: its connection ends, and nobody waits for it. `first_term`: from now on only processes of this
  // term or a later one act in its name, see WorkerPlace.
  void lost(int worker, uint32_t first_term);
  // A worker is done. Nobody waits for it, and its last pushes, which may still come, count.
  void left(int worker);
  // A worker has another process, of this term.
  void back(int worker, uint32_t first_term);
  // Of values that a program updates, see ServerStores; waits for the next one at most so long.
  std::optional<ServerStores::Taken> take(double longest_s);
  void finish(size_t part, size_t piece, const Bytes& weight);
  std::map<std::string, double> metrics() const;
  // A file of what its threads do, until close(): for a process that is no rank. Throws if it cannot be written.
  void start_timeline(Timeline::Setup setup);
  // Its threads end. Its values exist as long as this. A forked child leaves them alone.
  void close();

 private:
  bool is_connected(int) const override { return false; }
  void connected(int rank, int dialler, int stream, ByteStream bytes) override;
  void is_out_of_reach(int, const OutOfReach&) override {}
  void require_worker(int worker) const;
  void look_at_all();

  const int capacity_;
  const Credentials credentials_;
  ServerShared shared_;
  std::vector<std::unique_ptr<ServerThread>> threads_;
  std::shared_ptr<Timeline> timeline_;
  const OwnProcess process_;
};

}  // namespace ringtrain
