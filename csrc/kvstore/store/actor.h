// Operations of a worker, or of the server, on chunks: one chunk at a time, under its mutex. None of them waits.
//
// Whose thread runs it does not matter: where a worker shares memory with its server it is the worker's own, else one
// of the server. All of them keep denormals (KeptDenormals).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/wait.h"
#include "kernels/quantize.h"
#include "kvstore/store/part.h"

namespace ringtrain {

// Where a worker puts what it pushes while a round is open.
//
// The slots of one worker in one Part. They go back by themselves when their rounds are closed, and the last one used
// is the first one used again, while it is in the cache. One thread at a time.
class SlotPool {
 public:
  // `open`: slots that this worker has filled before, in a process that is gone.
  struct Open {
    size_t chunk;
    uint32_t slot;
    uint64_t round;
  };
  SlotPool(Part& part, size_t worker, const std::vector<Open>& open);

  // kNoSlot where all are in use. It stays free until it is told to be open.
  uint32_t take();
  void give_back(uint32_t slot) { free_.push_back(slot); }
  void note_open(const Open& open) { open_.push_back(open); }
  // How many rounds wait for others, as far as it has looked.
  size_t open() const { return open_.size(); }
  void look();

 private:
  Part& part_;
  const size_t worker_;
  std::vector<uint32_t> free_;
  std::deque<Open> open_;
  uint32_t reserved_ = 0;
};

// A worker's values for one chunk, on a multiple of their element's bytes.
struct Source {
  const void* values;
  DType dtype;                            // of the key, or float32 for 16-bit floats
  Quantizer quantizer;                    // of a kind: then `values` are codes for a float32 key
  const ElementRanges* ranges = nullptr;  // of these elements, one behind the other; null: all of the chunk
};

struct Rates {
  double lr, wd;
};

// Where the value of a chunk goes.
struct Answer {
  void* place;
  DType dtype;                            // of the key, or for 16-bit floats float32
  const ElementRanges* ranges = nullptr;  // as in Source
  bool is_there = false;                  // whether it went
  uint64_t num_update = 0;                // of the value that did
};

enum class Outcome : uint8_t {
  applied,    // asynchronous: the value has changed; synchronous: the round is closed
  held,       // it is kept until the others have pushed
  duplicate,  // it was counted before
  early,      // one before it has not come; nothing has changed
  full,       // this worker is too far ahead of the others; nothing has changed
  busy,       // another actor holds the chunk; nothing has changed
  left,       // it is kept for the program that updates, which may begin
};

enum class Reading : uint8_t { done, not_yet, busy };

// The error for a worker that needs `what`, which its server does not have. `is_recovery`: the server has taken the
// place of a lost one, with which it may have been lost.
Error lacking(const std::string& what, bool is_recovery);
// The error of a process that acts in the name of a worker when a later term of that worker has begun.
Error expelled(uint32_t worker);

// One thread at a time. A worker has one in its own process, for the keys that it reaches there, and one at the server,
// for others. One that comes back makes its own when the process before is dead, or is expelled.
class Actor {
 public:
  static constexpr uint32_t kNewestTerm = ~uint32_t{0};

  // Puts in order what processes before may have left; waits for it at most `timeout_s`, then throws stalled. `term`:
  // of the process in whose name it acts, see WorkerPlace. Once a later term has begun, changes throw peer_lost.
  Actor(std::shared_ptr<Part> part, uint32_t number, double timeout_s, uint32_t term = kNewestTerm);

  Part& part() { return *part_; }
  uint32_t number() const { return number_; }
  bool is_server() const { return number_ == part_->layout().actor_of_server(); }

  // The `seq`-th push of a key by this worker, counted from 1. Elements that are not pushed are not updated; in a round
  // they count as zero. `answer` may be null; it gets the value if the state is there that a read() after this push
  // needs. Throws where an asynchronous store has no rule: invalid, or peer_lost if its server has taken the place of a
  // lost one.
  // `has_begun`: another chunk of this push was pushed before, so a later term does not end it.
  Outcome push(size_t chunk, uint64_t seq, const Source& source, const Rates& rates, Answer* answer,
               bool has_begun = false);
  // The value, when `pushes` of this worker are in it, and the others are not too far behind.
  Reading read(size_t chunk, uint64_t pushes, Answer& answer);

  // Copies a push to a piece of an asynchronous store to the memory of the Part, before the first chunk is pushed. If
  // this process dies in between, the server applies the rest. The values of the chunks follow each other. `ranges`: of
  // each chunk, or none: all elements. The push that was copied before must be over. From publish() on this one counts.
  // Both throw peer_lost once the server has closed the record to this process. stage() throws stalled where a process
  // before holds the record for long.
  void stage(size_t piece, uint64_t seq, const Source& source, const Rates& rates,
             const std::vector<const ElementRanges*>& ranges);
  void publish();
  // For the server. Applies the push that a dead worker has copied to the chunks that have not counted it. Returns
  // false where one of them is busy, or the worker writes another push: it is to be called again.
  bool finish_push_of(size_t worker);
  // For the server. Applies the next push of a worker to a chunk, in place of a connection that has ended. Returns
  // false where the chunk is busy.
  bool push_for(size_t worker, size_t chunk, uint64_t seq, const Source& source, const Rates& rates);
  // Throws peer_lost where another process has taken, or may take, the place of this one.
  void require_term() const;

  // The following are true when done, and false when busy. `values` is in the dtype of the key. `change`: counts the
  // changes of a process that may come twice, see change_number(): one that was carried out does nothing. 0: carries it
  // out in any case.
  bool assign(size_t chunk, const void* values, uint64_t change = 0);
  // From now on the rule is this one (0: none), its states are zero, and it has updated the chunk so many times. Or it
  // is the one that was there with other numbers, and states and count go on.
  bool take_rule(size_t chunk, uint32_t rule, uint64_t num_update);
  bool take_numbers(size_t chunk, uint32_t rule);
  // Closes the rounds that now can be, after somebody has joined.
  bool settle(size_t chunk);
  // While a worker waits elsewhere: the others no longer wait here for its next push. Returns whether something has
  // changed; what is busy stays as it is.
  bool let_pass(size_t chunk, size_t worker);
  // Before a worker that was absent, gone or has joined is here again: nobody waits for what it has not pushed.
  bool let_in(size_t chunk, size_t worker);
  // Counts the pushes of a worker from 0 again, if none of a process of this term are counted. Earlier pushes stay.
  bool count_anew(size_t chunk, size_t worker, uint32_t term);
  // An array of the Part in its own dtype, to save or load: 0 the value, 1 the master, from 2 on the states.
  bool read_array(size_t chunk, size_t array, void* place);
  bool write_array(size_t chunk, size_t array, const void* values, uint64_t change = 0);
  bool set_num_update(size_t chunk, uint64_t num_update, uint64_t change = 0);

  // Where the rule is a program, for the server, which runs it: the next gradient and the value, both in the wide
  // dtype, and all stays as it is. And the value that the program has made of them.
  Reading take(size_t chunk, void* gradient, void* weight);
  bool finish(size_t chunk, const void* weight);

  // How many pushes of a worker a chunk, or all chunks of a piece, have counted. Reads past the mutex: for a worker
  // that does not push now.
  uint64_t pushes_of(size_t chunk, size_t worker) const { return part_->worker(chunk, worker).pushes; }
  uint64_t fewest_pushes(size_t piece, size_t worker) const;
  uint64_t num_update(size_t chunk) const { return part_->record(chunk).updates; }
  // How many of its pushes are held.
  size_t held();
  // Whether read() is worth a try: rounds are looked at without the mutex.
  bool may_be_ready(size_t chunk, uint64_t pushes) const;
  // Returns the workers that read() waits for.
  std::vector<size_t> awaited(size_t chunk, uint64_t pushes) const;
  // Names them in a message: "worker 1 has pushed it 3 times, worker 0 4 times".
  std::string missing(size_t chunk, uint64_t pushes) const;
  const std::shared_ptr<Part>& shared_part() const { return part_; }

 private:
  static constexpr uint32_t kValue = 1, kMaster = 2, kFirstState = 4;  // bits of arrays

  struct Contribution {
    const void* values;  // in the wide dtype
    Rates rates;
  };

  void put_in_order(double timeout_s);
  // Whether a change was carried out before. Throws peer_lost as require_term() does.
  bool was_carried_out(size_t chunk, uint64_t change) const;
  // Calls write(ChunkChange) for these arrays, and counts the change, unless it was carried out before. Returns false
  // where the chunk is busy.
  template <typename Write>
  bool change_once(size_t chunk, uint32_t arrays, uint64_t change, Write write);
  std::unique_ptr<HeldStage> hold_stage() const;
  // Lets a process that may do so change the state of its record.
  template <typename Next>
  void advance_stage(Next next);
  Source spread(const KeyChunk& chunk, const Source& source);
  void apply(ChunkChange& change, size_t chunk, const UpdateRule& rule, const ElementRanges* ranges,
             const void* gradient, const Rates& rates);
  const UpdateRule* rule_of(size_t chunk);
  const UpdateRule& required_rule(size_t chunk);
  const void* widened(const KeyChunk& chunk, const Source& source);
  uint32_t arrays_of(const KeyChunk& chunk, const UpdateRule* rule) const;
  void store(ChunkChange& change, size_t chunk, const void* wide_values);
  Outcome push_at_once(size_t chunk, size_t worker, uint64_t seq, const Source& source, const Rates& rates);
  ElementRanges staged_ranges(size_t worker, size_t place, size_t& next) const;
  bool finish_chunk_of(size_t worker, size_t chunk, uint64_t version, const ElementRanges* ranges, size_t begin);
  Outcome push_in_round(size_t chunk, uint64_t seq, const Source& source, const Rates& rates);
  Outcome leave(size_t chunk, size_t worker, uint64_t seq, const Source& source);
  Outcome deposit(size_t chunk, uint64_t seq, const Source& source, const Rates& rates);
  bool can_close(size_t chunk, const Contribution* own) const;
  void close(size_t chunk, uint64_t seq, const Contribution* own);
  bool close_all(size_t chunk);
  ChunkChange::Workers in_round(size_t chunk, const Contribution* own) const;
  uint64_t position_to_pass(size_t chunk, size_t worker) const;
  std::vector<Contribution> contributions(size_t chunk, const Contribution* own);
  const void* sum_of(size_t chunk, const std::vector<Contribution>& all);
  void let_slots_go(size_t chunk, const Contribution* own);
  bool is_of_program(size_t chunk);
  bool has_gradient(size_t chunk) const;
  bool is_ready(size_t chunk, uint64_t pushes) const;
  // Returns whether its pulls wait for pushes of others.
  bool waits_for_others() const {
    return part_->spec().is_synchronous || part_->spec().max_staleness != PartSpec::kNoBound;
  }
  bool bounds_others(size_t worker) const;
  uint64_t position_for(size_t chunk, size_t worker) const;
  void answer_from(size_t chunk, Answer& answer);

  const std::shared_ptr<Part> part_;
  const uint32_t number_, term_;
  const double timeout_s_;
  std::unique_ptr<SlotPool> slots_;  // of a worker in a synchronous store
  std::unique_ptr<char[]> own_, sum_, spread_;
  uint32_t rule_number_ = 0;
  std::shared_ptr<const UpdateRule> rule_;
  size_t staged_bytes_ = 0;  // for which there is room
};

// Calls visit(chunk) for those from `first` up to `last` until each has said that it is done; others go first where one
// is busy. Throws stalled when one was busy for longer than `timeout_s`.
template <typename Visit>
void visit_all(Part& part, size_t first, size_t last, double timeout_s, Visit visit);

[[noreturn]] void throw_busy(Part& part, size_t chunk, double timeout_s);

// How long somebody else keeps a chunk without coming to an end. While this thread does not run, or is stopped itself,
// it cannot tell.
class Standstill {
 public:
  double waited_s(Part& part, size_t chunk) {
    constexpr double kLongestLook_s = 0.02;
    const uint64_t closed = part.record(chunk).closed.load(std::memory_order_relaxed);
    const double now = now_s();
    const bool is_same = &part == part_ && chunk == chunk_ && closed == closed_;
    waited_s_ = is_same ? waited_s_ + std::min(now - looked_at_, kLongestLook_s) : 0;
    part_ = &part;
    chunk_ = chunk;
    closed_ = closed;
    looked_at_ = now;
    return waited_s_;
  }

 private:
  const Part* part_ = nullptr;
  size_t chunk_ = 0;
  uint64_t closed_ = 0;
  double looked_at_ = 0, waited_s_ = 0;
};

template <typename Visit>
void visit_all(Part& part, size_t first, size_t last, double timeout_s, Visit visit) {
  std::vector<size_t> left;
  for (size_t i = first; i < last; ++i)
    if (!visit(i)) left.push_back(i);
  for (Standstill standstill; !left.empty(); Waiter::nap(0)) {
    std::vector<size_t> still;
    for (const size_t chunk : left)
      if (!visit(chunk)) still.push_back(chunk);
    if (!still.empty() && standstill.waited_s(part, still.front()) > timeout_s)
      throw_busy(part, still.front(), timeout_s);
    left.swap(still);
  }
}

}  // namespace ringtrain
