// The records in the memory of a Part besides arrays: plain records that all processes of a host share.
//
// Memory that is all zero is a valid beginning for each of them but the mutexes.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/wait.h"

namespace ringtrain {

// Whether others wait for a worker.
enum class Presence : uint32_t {
  absent,  // never came: nobody waits for it
  here,
  joined,  // has no more data: rounds close without it
  gone,    // dead: rounds wait for its return, staleness does not
};

// Which process may act in the name of a worker. Each process that takes the place of a worker has a term of its own,
// one more than that of the process before it. An earlier one that was expelled and runs again changes nothing.
struct WorkerPlace {
  std::atomic<Presence> presence;
  std::atomic<uint32_t> first_term;  // the earliest term whose changes count
  std::atomic<int64_t> join;         // the number of its join, where it has joined
};

// The rule of the chunks whose `rule` is its number.
struct RuleRecord {
  static constexpr size_t kLongestName = 24, kMostNumbers = 16;

  struct Number {
    char name[kLongestName];
    double value;
  };

  uint32_t number;
  uint32_t count;
  char name[kLongestName], form[kLongestName];
  Number numbers[kMostNumbers];
};

struct PartHeader {
  static constexpr size_t kRules = 4;  // the latest ones

  // Rung when a round is closed, or when what others wait for has changed.
  Flag doorbell;
  // Whether the server has requests that wait for that and has to be told.
  alignas(64) std::atomic<uint32_t> has_parked;
  std::atomic<uint32_t> rule;         // the number of the latest one; 0: none
  std::atomic<uint32_t> is_recovery;  // whether its server has taken the place of a lost one
  std::atomic<uint32_t> is_restored;  // whether it began from a snapshot, in which some pushes of each worker were not
  RuleRecord rules[kRules];
  // Here follows the WorkerPlace of each worker.
};

constexpr uint32_t kNoSlot = 0;  // slots are numbered from 1

constexpr size_t kStates = 3;            // the most that a rule remembers
constexpr size_t kArrays = 2 + kStates;  // of a chunk: value, master, states

// The number of a change that a worker asks its server for beside pushes. `count`: of those of its process, from 1 on.
// A process that takes the place of a worker begins with higher numbers than the process before it had.
constexpr uint64_t kChangesOfProcess = uint64_t{1} << 44;
// So many processes may take the place of one worker, one after the other: terms have the bits that are left.
constexpr uint32_t kTerms = uint32_t{1} << 20;
constexpr uint64_t change_number(uint32_t term, uint64_t count) { return term * kChangesOfProcess + count; }

// Of one worker in one chunk. Guarded by the chunk's mutex.
struct WorkerRecord {
  // In rounds, or where staleness is bounded: how far it has come for the others.
  uint64_t position() const { return pushes + offset > passed ? pushes + offset : passed; }

  uint64_t pushes;                 // that were counted
  uint64_t offset;                 // its n-th push belongs to round n + offset
  uint64_t term;                   // of asynchronous stores: of the process whose pushes are counted
  uint64_t change;                 // the last change_number() that was carried out
  uint64_t passed;                 // others do not wait for its pushes of rounds up to this one
  uint32_t first_slot, last_slot;  // of what it has pushed for rounds that are open, in order
};

struct ChunkRecord {
  pthread_mutex_t mutex;          // robust, shared by processes
  std::atomic<uint32_t> journal;  // of the change that is under way: its number + 1; 0: there is none
  std::atomic<uint32_t> holder;   // who had the mutex last: its number as an actor + 1
  // Rounds of synchronous stores; of others, pushes of all workers. Written last: from then on a change has happened.
  alignas(64) std::atomic<uint64_t> closed;

  // Guarded by the mutex. A journal keeps it from here on.
  uint64_t updates;        // of the rule: num_update
  uint32_t rule;           // number of its rule; 0: none
  uint32_t pending;        // of an asynchronous store whose rule is a program: who has pushed what it has not taken + 1
  int64_t moved[kArrays];  // of each array: bytes from its home, see Layout::array_at, to where it is
  // Here follows the WorkerRecord of each worker.
};
constexpr size_t kChunkKeptAt = offsetof(ChunkRecord, updates);

// The chunk that has a journal.
struct alignas(64) JournalPlace {
  std::atomic<uint32_t> chunk;     // whose change it keeps: its number + 1; 0: of none
  std::atomic<uint32_t> reserved;  // what of it has memory: bit i for its spare array i, and then one for its record
};

// Of a chunk that is changed: how it was before. Beside it are spare arrays, into which the change writes. Where an
// array was before is the spare one of the next change.
struct JournalRecord {
  uint64_t closed;
  int64_t moved[kArrays], moved_before[kArrays];  // as ChunkRecord::moved, of the spare arrays
  uint32_t first_worker, workers;                 // whose records it keeps
  // Here follow the chunk's kept record and those of these workers.
};

// The state of a StageRecord, as one word, so that exactly one of two comes first: a process publishes a push, or the
// server closes the record to it.
struct StageState {
  static constexpr int kVersionBits = 44;
  static constexpr uint64_t kVersions = uint64_t{1} << kVersionBits;

  // Odd while the record and the values are written; then 2 more than before. 0: there has been none.
  uint64_t version() const { return word % kVersions; }
  bool is_published() const { return version() != 0 && version() % 2 == 0; }
  // Processes of earlier terms neither write nor publish.
  bool is_closed_to(uint32_t term) const { return word / kVersions > term; }

  StageState begun() const { return {word | 1}; }
  StageState published() const { return {word + 1}; }
  StageState closed_before(uint32_t first_term) const {
    return is_closed_to(first_term) ? *this : StageState{first_term * kVersions + version()};
  }

  uint64_t word;
};

// A push to all chunks of a piece of an asynchronous store, copied before the first chunk is pushed. Its values are at
// Layout::stage_at. Written by its worker; read by the server once that worker is dead.
struct StageRecord {
  // Robust, shared by processes. Held while the record and the values are written, or read by the server: a process
  // that was only stopped, and whose place another one has taken, cannot write between.
  pthread_mutex_t mutex;
  std::atomic<uint64_t> state;  // a StageState
  uint64_t seq, term;           // of the worker's push; as WorkerRecord::term
  uint32_t piece;
  uint32_t dtype;  // of the values
  uint32_t codes;  // the kind of a Quantizer
  float threshold;
  uint64_t ranges_before;  // bytes of ranges before the values; 0: the values are all elements of the piece
  uint64_t value_bytes;
  double lr, wd;
};

// The content of a slot. Written by its worker, read by the actor that closes the round.
struct SlotRecord {
  uint64_t seq;
  double lr, wd;
  uint32_t next;  // slot of its next push of the same chunk
  uint32_t unused;
};

}  // namespace ringtrain
