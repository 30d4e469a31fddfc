// The stores of a server, and requests of workers about more than one chunk.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/thread_annotations.h"
#include "kvstore/store/actor.h"
#include "kvstore/store/part.h"
#include "kvstore/wire/message.h"

namespace ringtrain {

// A chunk of a push that was begun on a connection that has ended.
struct LateChunk {
  int worker;
  uint32_t store, part, chunk;
  uint64_t seq;
  std::shared_ptr<const char> body;
  std::shared_ptr<const ElementRanges> ranges;  // of the source, if it has some
  Source source;                                // in the body
  Rates rates;
};

// Any thread. Its errors are for the worker that asked.
class ServerStores {
 public:
  // `timeout_s`: how long another process may keep a chunk.
  ServerStores(bool shares_memory, double timeout_s) : shares_memory_(shares_memory), timeout_s_(timeout_s) {}

  const std::shared_ptr<PartTable>& table() const { return table_; }
  // Null where there is none.
  std::shared_ptr<Part> part(uint32_t store, uint32_t number) const;

  // Answers a question of a worker, see Said. A question that has come before gets the same answer, and nothing
  // happens.
  Bytes answer(int worker, const Head& question, const Bytes& body);

  // Whether others wait for a worker.
  void set_presence(int worker, Presence presence);
  // A worker waits in this store, at any server. Others may be ahead of it here, and wait for it while it waits for
  // them elsewhere: after it has come back, since servers have counted different pushes of the process before it; and
  // after this server has gone on from a snapshot, since each worker has lost other pushes. In these cases the others
  // no longer wait for its next push. Returns whether something has changed.
  bool let_pass(int worker, uint32_t store);
  // The place of a worker has a process of this term, see WorkerPlace. False where a later one has had it already.
  bool admit(int worker, uint32_t term);
  // Applies the rest of the last pushes of dead workers, see Actor::finish_push_of, and what finish() was given.
  // Returns false where a chunk was busy: it is to be called again.
  bool finish_pushes();
  // Applies these, now or in finish_pushes(). Those of a chunk are in order.
  void finish(std::vector<LateChunk> chunks);

  // All that is kept, for a server that takes the place of this one: of each Part its store and its chunks, what it is,
  // and the bytes of these chunks.
  std::vector<std::pair<uint32_t, size_t>> parts();
  Bytes describe(size_t part);
  Bytes copy(size_t part, size_t first, size_t last);
  // Of values that a program updates: the next gradient of a piece of a key, and its value, in the wide dtype. It is
  // there until finish().
  struct Taken {
    uint32_t store, part, piece;  // the part by its place in parts()
    KeyPiece of_key;
    Bytes gradient, weight;
  };
  std::optional<Taken> take();
  // The value that the program has made of it. Calls changed(part, chunk) for its chunks.
  void finish(size_t part, size_t piece, const Bytes& weight, const std::function<void(Part&, size_t)>& changed);
  // The memory of a server before this one, as a worker of this host still has it: it goes on with that.
  struct Found {
    uint32_t store, number;
    Bytes spec;
    int64_t pid;  // of the worker
    uint64_t ticket;
  };
  // Of a server that has none yet: all, by store in the order of their numbers. Throws failure where one of them cannot
  // be seen or is missing, or is updated by a program, whose states are not in it; then it still has none.
  void adopt(const std::vector<Found>& all);
  // Makes the next Part from its description; then it is given the chunks. put() returns the number of the next one.
  void restore(uint32_t store, const Bytes& description);
  // This server takes the place of a lost one: to be called before restore() and adopt().
  void begin_recovery() { is_recovery_ = true; }
  bool is_recovery() const { return is_recovery_.load(std::memory_order_relaxed); }
  size_t put(size_t part, size_t first, const Bytes& chunks);

 private:
  struct Answered {
    int64_t number = 0;
    Bytes body;
  };
  struct Store {
    std::optional<RuleWords> rule;
    std::vector<std::unique_ptr<Actor>> actors;  // the server's, by part
    size_t kept = 0;                             // parts that were taken over from the server before: the first ones
    std::map<uint32_t, int64_t> joins;           // by worker that has joined: the number of this join
    std::map<uint32_t, int64_t> ended_joins;     // by worker: its last join whose round is over
  };

  Actor& actor_of(size_t part) REQUIRES(mutex_);
  std::optional<Taken> take_piece(size_t part, size_t piece) REQUIRES(mutex_);
  Actor& add(uint32_t store, const PartSpec& spec, int workers) REQUIRES(mutex_);
  Actor& keep(uint32_t store, const std::shared_ptr<Part>& part) REQUIRES(mutex_);
  Bytes answer_now(int worker, const Head& question, const Bytes& body) REQUIRES(mutex_);
  Bytes create(int worker, const Head& question, const Bytes& body) REQUIRES(mutex_);
  // Of the part with just these keys that was taken over from the server before; none where there is none.
  static std::optional<uint32_t> number_of_kept(const Store& store, const PartSpec& spec);
  Bytes attach(int worker, const Head& question) REQUIRES(mutex_);
  void set_rule(uint32_t store, const RuleWords& rule) REQUIRES(mutex_);
  void put_rule(Actor& actor, const RuleWords& rule, bool keeps_states);
  void count_from_term(Actor& actor, int worker) REQUIRES(mutex_);
  void finish_all() REQUIRES(mutex_);
  bool finish_late(int worker) REQUIRES(mutex_);
  void set_presence(Actor& actor, int worker, Presence presence);
  void set_joined(Actor& actor, uint32_t worker, int64_t number);
  void join(Store& store, const JoinWords& join);
  // A worker that has left the round of joins has heard whose joins were in it.
  void resume(Store& store, const EndedJoins& ended);
  PartWords words_of_part(uint32_t number, Part& part, int worker) const;

  const bool shares_memory_;
  const double timeout_s_;
  const std::shared_ptr<PartTable> table_ = std::make_shared<PartTable>();
  std::atomic<bool> is_recovery_ = false;
  Mutex mutex_;
  std::map<uint32_t, Store> stores_ GUARDED_BY(mutex_);
  std::map<int, uint32_t> first_terms_ GUARDED_BY(mutex_);  // by worker
  std::set<int> gone_ GUARDED_BY(mutex_);                   // workers that are dead
  std::set<int> unfinished_ GUARDED_BY(mutex_);             // workers: a dead process may have left a push in parts
  std::map<int, std::vector<LateChunk>> late_ GUARDED_BY(mutex_);  // by worker
  std::atomic<bool> has_unfinished_ = false;
  std::vector<std::pair<uint32_t, size_t>> order_ GUARDED_BY(mutex_);  // store and number of each Part, as they came
  size_t next_part_ GUARDED_BY(mutex_) = 0, next_piece_ GUARDED_BY(mutex_) = 0;  // of take()
  std::map<int, Answered> answered_ GUARDED_BY(mutex_);                          // the last question of each worker
};

}  // namespace ringtrain
