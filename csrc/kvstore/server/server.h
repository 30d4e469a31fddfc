// A server of key-value stores: threads that keep values, update them with what workers push, and give them out. In a
// process of its own or in a worker's.
//
// Workers that share memory with it come only to ask for that: they update the values themselves.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fork.h"
#include "kvstore/server/server_thread.h"
#include "network/connector.h"
#include "network/handshake.h"
#include "runtime/timeline.h"

namespace ringtrain {

struct ServerOptions {
  int number = 0, capacity = 1;  // of this server; how many workers there may be
  std::vector<int> listeners;    // sockets, which it owns from now on
  std::string secret, token;     // see Credentials
  int threads = 1;
  std::string node;  // equal in processes that may share memory; empty: it shares none
  double timeout_s = 30, drop_percent = 0;
  int verbose = 0;
};

// Any thread.
class StoreServer final : Connector::Owner {
 public:
  explicit StoreServer(const ServerOptions& options);
  ~StoreServer() override;

  ServerStores& stores() { return shared_.stores; }
  const ServerWords& words() const { return shared_.words; }

  // A worker is dead: its connection ends, and nobody waits for it. And it is back. `first_term`: from now on only
  // processes of this term or a later one act in its name, see WorkerPlace.
  void lost(int worker, uint32_t first_term);
  void back(int worker, uint32_t first_term);
  // Of values that a program updates, see ServerStores; waits for the next one at most so long.
  std::optional<ServerStores::Taken> take(double longest_s);
  void finish(size_t part, size_t piece, const Bytes& weight);
  std::map<std::string, double> metrics() const;
  // A file of what its threads do, until close(): for a process that is no rank. Throws if it cannot be written.
  void start_timeline(Timeline::Setup setup);
  // Its threads end. What it keeps is there as long as this. A forked child leaves them alone.
  void close();

 private:
  bool is_connected(int) const override { return false; }
  void connected(int rank, int dialler, Descriptor socket) override;
  void is_out_of_reach(int, const OutOfReach&) override {}
  void look_at_all();

  const int capacity_;
  const Credentials credentials_;
  ServerShared shared_;
  std::vector<std::unique_ptr<ServerThread>> threads_;
  std::shared_ptr<Timeline> timeline_;
  const OwnProcess process_;
};

}  // namespace ringtrain
