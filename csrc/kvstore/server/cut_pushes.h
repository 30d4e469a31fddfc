// Pushes of keys at several asynchronous servers, of workers that may die before all servers have them.
//
// One server of a key, the primary, decides: a push counts once the primary begins to apply it, which its worker asks
// for when all other servers have it. States of a push at the primary, who leaves each and when:
//
//     here      begun: its worker says that all others have it.
//               dropped: its worker dies, or drops the push.
//     begun     for ever. Only the death of the server ends what it applies.
//
// And at each other server:
//
//     ready     applied, dropped: its worker says so, as soon as the primary has begun it or a server has refused it.
//               orphaned: its connection ends, or its worker gives it up, because it has lost the primary.
//     orphaned  ready: its worker sends it again over another connection. Not if it has given it up.
//               applied, dropped: after the death of the worker each primary tells the others, through the scheduler,
//               what it has begun. A primary that is stopped is lost after kv_timeout_s.
//               dropped: the scheduler tells of the loss of the primary, and the worker is dead or has given it up.
//
// A server that has lost the scheduler ends.
//
// A worker that shares memory with all servers of the key copies its push to each of them, and then publishes the
// copies, that of the primary last (StageRecord). States at the primary:
//
//     copied    begun: its worker publishes it.
//               dropped: the server hears of the death of the worker, or of its next process, and closes the record.
//     begun     for ever. The worker applies it, or after its death the server.
//
// And at each other server:
//
//     copied    published: its worker does so.
//               dropped: as at the primary.
//     published applied: its worker does so, or the server after its death if one chunk is.
//               orphaned: its worker is dead, and no chunk is applied.
//     orphaned  applied, dropped: as above. The primary tells a server that goes on with such memory when it hears that
//               this server is back. A primary that goes on with such memory tells the others, also of dead processes
//               whose places have been taken again.
//
// A worker that shares memory with some servers of the key only pushes it by TCP.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/thread_annotations.h"
#include "kvstore/store/actor.h"

namespace ringtrain {

// A chunk of a push whose connection has ended, to be applied.
struct LateChunk {
  static constexpr uint64_t kNext = 0;

  int worker;
  uint32_t store, part, chunk;
  uint64_t seq;  // kNext: the next one that counts
  std::shared_ptr<const char> body;
  std::shared_ptr<const ElementRanges> ranges;  // null: all of the chunk
  Source source;                                // in the body
  Rates rates;
};

// Any thread. Without clocks, sockets and threads of its own.
class CutPushes {
 public:
  // A process pushes to a key.
  struct Pusher {
    int worker;
    uint32_t term;  // of the process, see WorkerPlace
    uint32_t store, key;
    bool operator<(const Pusher& other) const { return tie() < other.tie(); }
    std::tuple<int, uint32_t, uint32_t, uint32_t> tie() const { return {worker, term, store, key}; }
  };

  // `server`: the number of this one.
  explicit CutPushes(int server) : server_(static_cast<uint32_t>(server)) {}

  bool is_primary(uint32_t server) const { return server == server_; }

  // A connection is about to apply the push, or has refused it. begin() throws peer_lost in the primary after the death
  // of the process.
  void begin(const Pusher& pusher, uint32_t primary, uint64_t push) EXCLUDES(mutex_);
  void refuse(const Pusher& pusher, uint32_t primary, uint64_t push) EXCLUDES(mutex_);
  // The connection of a push that is ready has ended.
  void keep(const Pusher& pusher, uint32_t primary, uint64_t push, std::vector<LateChunk> chunks) EXCLUDES(mutex_);
  // In memory that a process, which is dead, has shared with this server, the primary, it has begun the push.
  void note_begun(const Pusher& pusher, uint64_t push) EXCLUDES(mutex_);
  // The fate of a push of a dead process that is in the memory of this server, as far as it is known.
  enum class Fate { open, applies, drops };
  Fate fate_of(const Pusher& pusher, uint32_t primary, uint64_t push) const EXCLUDES(mutex_);
  // Its worker does not send it again, although it lives.
  void give_up(const Pusher& pusher, uint64_t push) EXCLUDES(mutex_);

  // The processes of this worker before `first_term` are dead. Returns for settle() at the other servers what this one
  // has begun of theirs.
  Bytes lose_worker(int worker, uint32_t first_term) EXCLUDES(mutex_);
  // The same again of all dead workers.
  std::vector<std::pair<int, Bytes>> begun_of_dead() const EXCLUDES(mutex_);
  // Takes these at another server.
  void settle(int worker, int server, const Bytes& begun) EXCLUDES(mutex_);
  void lose_server(int server) EXCLUDES(mutex_);
  void return_server(int server) EXCLUDES(mutex_);

  // Whether pushes of processes of this worker before `first_term` are orphaned.
  bool has_orphans(int worker, uint32_t first_term) const EXCLUDES(mutex_);
  // Returns chunks to apply, in order; and whether there are some.
  std::vector<LateChunk> take() EXCLUDES(mutex_);
  bool has_settled() const EXCLUDES(mutex_);

 private:
  // All from the first to the last one, except those that were refused. The first push of a key has number 1.
  struct Begun {
    bool is_empty() const { return last == 0; }
    bool has(uint64_t push) const { return first <= push && push <= last && refused.count(push) == 0; }

    uint64_t first = std::numeric_limits<uint64_t>::max(), last = 0;
    std::set<uint64_t> refused;
  };
  using BegunPushes = std::map<Pusher, Begun>;
  struct Orphan {
    uint32_t primary;
    std::vector<LateChunk> chunks;
    bool is_given_up = false;
  };
  // Of a worker, as a primary has told it.
  struct Told {
    uint32_t first_term = 0;
    BegunPushes begun;
  };
  void add_begun(const Pusher& pusher, uint64_t push) REQUIRES(mutex_);
  Bytes begun_before(int worker, uint32_t first_term) const REQUIRES(mutex_);
  // `is_over`: nobody sends it again.
  Fate fate(const Pusher& pusher, uint32_t primary, uint64_t push, bool is_dead, bool is_over) const REQUIRES(mutex_);
  void settle_orphans(int worker) REQUIRES(mutex_);
  void settle_all() REQUIRES(mutex_);

  const uint32_t server_;
  mutable Mutex mutex_;
  std::map<int, uint32_t> first_terms_ GUARDED_BY(mutex_);  // by worker: the processes before are dead
  BegunPushes begun_ GUARDED_BY(mutex_);                    // of those whose primary is this server
  std::map<Pusher, std::map<uint64_t, Orphan>> orphans_ GUARDED_BY(mutex_);
  // Former orphans. Several connections may leave the same push.
  std::map<Pusher, std::set<uint64_t>> settled_ GUARDED_BY(mutex_);
  std::map<std::pair<int, uint32_t>, Told> told_ GUARDED_BY(mutex_);  // by worker and primary
  std::set<uint32_t> lost_servers_ GUARDED_BY(mutex_);
  std::vector<LateChunk> applied_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
