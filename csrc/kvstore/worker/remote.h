// The servers of a job as a worker reaches them over TCP: what it asks them, and what it pushes and pulls where it does
// not share memory with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/thread_annotations.h"
#include "kernels/quantize.h"
#include "kvstore/store/layout.h"
#include "kvstore/wire/message.h"
#include "network/tcp.h"

namespace ringtrain {

struct RemoteOptions {
  int worker = 0, capacity = 1;                       // its number, and how many there may be
  uint32_t term = 0;                                  // of this process, see WorkerPlace
  std::vector<std::vector<SocketAddress>> servers;    // by the number of the server: where it listens
  std::string secret, token;                          // see Credentials
  double resend_s = 1, timeout_s = 30, return_s = 0;  // how long a server may be gone before it is lost
  size_t outbox_bytes = 64 << 20;
  double drop_percent = 0;
  int verbose = 0;
  // Called when a server is lost, on the thread of the Remote: it must not block.
  std::function<void(int server, const Error& error)> has_lost;
};

// An operation on a piece of a key at one server.
struct RemoteOperation {
  Said said = Said::push;  // push, pull, push_pull, assign, read_state or write_state
  int server = 0;
  uint32_t store = 0, part = 0;  // its number
  std::shared_ptr<const Layout> layout;
  size_t piece = 0;

  // Of the elements of the piece, or of its rows: what is sent, and where the answer goes. Null: neither.
  const char* values = nullptr;
  DType dtype = DType::float32;
  Quantizer quantizer;  // the values are codes
  char* out = nullptr;
  DType wanted = DType::float32;
  std::shared_ptr<const ChunkRows> rows;  // null: all of the piece
  bool copies = false;                    // the values may change as soon as start() has returned

  int64_t number = 0;  // of this worker's pushes of the key until now, with this one; of states: which array
  double lr = 0, wd = 0;
  int priority = 0;  // what is higher goes first

  // Once, on the thread of the Remote: it must not block. num_update: the smallest of its chunks.
  std::function<void(const std::optional<Error>& error, int64_t num_update)> done;
};

// The answer of a server to a question. Any thread.
class RemoteReply {
 public:
  // Whether it is there; waits for at most so long.
  bool wait(double longest_s);
  // Once it is there. Throws what went wrong.
  Bytes take();

  void finish(Bytes body);
  void fail(const Error& error);

 private:
  Mutex mutex_;
  Condition has_changed_;
  bool is_there_ GUARDED_BY(mutex_) = false;
  Bytes body_ GUARDED_BY(mutex_);
  std::optional<Error> error_ GUARDED_BY(mutex_);
};
using RemoteReplyPtr = std::shared_ptr<RemoteReply>;

class RemoteThread;

// Any thread.
class Remote {
 public:
  // Begins to dial all servers.
  explicit Remote(RemoteOptions options);
  // Pending operations fail.
  ~Remote();

  // Returns what they are. Throws peer_lost, naming the server that cannot be reached; nothing if it takes longer.
  std::optional<std::vector<ServerWords>> meet(double longest_s);

  // Questions to one server: of each, one at a time, in order. See Said for the bodies.
  RemoteReplyPtr create(int server, uint32_t store, int workers, const PartSpec& spec);
  RemoteReplyPtr attach(int server, uint32_t store, uint32_t first_part, size_t least_pieces);
  RemoteReplyPtr set_rule(int server, uint32_t store, const RuleWords& rule);
  // `number`: of next_join().
  RemoteReplyPtr join(int server, uint32_t store, int64_t number);
  RemoteReplyPtr resume(int server, uint32_t store, const EndedJoins& ended);
  int64_t next_join();
  static PartWords part_of(RemoteReply& reply) { return words_of<PartWords>(reply.take()); }
  static std::vector<PartWords> parts_of(RemoteReply& reply);

  // Tells the server what has become of a chunk, for which others may wait at it.
  void poke(int server, uint32_t store, uint32_t part, uint32_t chunk);

  // Begins it. False if there is no room for a copy of its values in so long; then nothing has happened.
  bool start(RemoteOperation operation, double longest_s);

  // News from others about a server: it is gone; or another one has taken its place.
  void lost(int server, const std::string& text);
  void back(int server, std::vector<SocketAddress> addresses);

  // All that is under way fails, and all that comes.
  void end(const Error& error);

  std::map<std::string, double> metrics() const;

 private:
  RemoteReplyPtr ask(int server, Head head, Bytes body);

  const std::unique_ptr<RemoteThread> thread_;
};

}  // namespace ringtrain
