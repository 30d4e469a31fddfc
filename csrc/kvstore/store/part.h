// The keys of one create() at one server: values, what rules remember of them, and what workers have pushed, in memory
// that all processes of a host may share.
//
// An actor makes all changes: a worker, or the server. It holds the mutex of one chunk at a time, writes down before in
// a journal how the records of that chunk were, and puts new values beside the old ones. If its process dies in the
// middle, the next one to hold the mutex goes on with the old ones: a change has happened as a whole, or not at all. A
// push of several chunks is copied to the memory before (StageRecord): if its worker dies between two chunks, the
// server applies the rest.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "kernels/optimize.h"
#include "kvstore/store/layout.h"
#include "kvstore/store/records.h"
#include "memory/shm.h"

namespace ringtrain {

// The memory of a Part: shared with the other processes of the host, or private where nothing is shared.
//
// It is zero, and large parts of it are never used: who uses some reserves it before.
class PartMemory {
 public:
  static PartMemory create_shared(size_t bytes);
  static PartMemory create_private(size_t bytes);
  static PartMemory attach(int64_t creator_pid, uint64_t ticket, size_t bytes);

  PartMemory(PartMemory&& other) noexcept;
  PartMemory& operator=(PartMemory&&) = delete;
  ~PartMemory();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool is_shared() const { return segment_.data() != nullptr; }
  uint64_t ticket() const { return segment_.ticket(); }  // of shared memory

  // Throws failure where a full /dev/shm has no more. Reserving what is reserved changes nothing.
  void reserve(size_t offset, size_t bytes);

 private:
  PartMemory(SharedSegment segment, char* data, size_t bytes);

  SharedSegment segment_;
  char* data_;
  size_t bytes_;
};

// Any thread. The memory of a chunk is for its holder, by a HeldChunk.
class Part {
 public:
  enum class Memory { shared, of_process };
  // `workers`: so many are here from the beginning. Values are zero. Throws failure where there is not enough memory.
  static std::shared_ptr<Part> create(const PartSpec& spec, int workers, Memory memory);
  // The same Part in another process of the host.
  static std::shared_ptr<Part> attach(const PartSpec& spec, int64_t creator_pid, uint64_t ticket);

  const Layout& layout() const { return layout_; }
  const PartSpec& spec() const { return layout_.spec(); }
  const KeyChunk& chunk(size_t number) const { return layout_.chunks()[number]; }
  size_t chunk_count() const { return layout_.chunks().size(); }
  PartMemory& memory() { return memory_; }

  PartHeader& header() { return at<PartHeader>(0); }
  std::atomic<Presence>& presence(size_t worker) { return place_of(worker).presence; }
  std::atomic<int64_t>& join(size_t worker) { return place_of(worker).join; }
  uint32_t first_term(size_t worker) { return place_of(worker).first_term.load(std::memory_order_seq_cst); }
  // From now on, changes by processes of earlier terms are refused, and they publish no push (StageRecord).
  void raise_first_term(size_t worker, uint32_t term);
  ChunkRecord& record(size_t chunk) { return at<ChunkRecord>(layout_.chunk_control_at(chunk)); }
  WorkerRecord& worker(size_t chunk, size_t worker) {
    return (&at<WorkerRecord>(layout_.chunk_control_at(chunk) + sizeof(ChunkRecord)))[worker];
  }
  StageRecord& stage(size_t worker) { return at<StageRecord>(layout_.stage_record_at(worker)); }
  char* stage_data(size_t worker) { return memory_.data() + layout_.stage_at(worker); }
  SlotRecord& slot(size_t worker, uint32_t slot) { return at<SlotRecord>(layout_.slot_control_at(worker, slot)); }
  char* slot_data(size_t worker, uint32_t slot) { return memory_.data() + layout_.slot_at(worker, slot); }
  char* value(size_t number) { return array(0, number); }
  char* master(size_t number) { return array(1, number); }  // of 16-bit floats that a rule updates
  char* state(size_t index, size_t number) { return array(2 + index, number); }
  char* array(size_t index, size_t number) {
    return memory_.data() + layout_.array_at(index, chunk(number)) + record(number).moved[index];
  }
  JournalPlace& journal_place(size_t journal) { return at<JournalPlace>(layout_.journal_place_at(journal)); }
  JournalRecord& journal(size_t journal) { return at<JournalRecord>(layout_.journal_at(journal)); }

  // Whether others in this process or another one wait for a round, and the server has to be told that it may have
  // answers. Called after each change.
  void ring() { header().doorbell.ring(); }
  bool has_parked() {
    // Either this sees that the server waits, or the server sees the change; WaitingRoom::enter() has the other fence.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return header().has_parked.load(std::memory_order_relaxed) != 0;
  }

  // The holder of a chunk, for a message: a worker's number, or -1 for the server or none.
  int holder(size_t chunk);

  // The server's, one thread at a time. Makes a rule known; it then is put to each chunk by Actor::take_rule. States
  // are arrays of their own. Throws invalid where there is no such rule, or it does not fit the dtype of a key.
  uint32_t add_rule(const std::string& name, const std::string& form, const std::map<std::string, double>& numbers);
  // Null for 0, and for a rule that is not one of the latest ones.
  std::shared_ptr<const UpdateRule> rule(uint32_t number);
  void reserve_states(const UpdateRule& rule);

 private:
  Part(PartSpec spec, PartMemory memory) : layout_(std::move(spec)), memory_(std::move(memory)) {}

  template <typename T>
  T& at(size_t offset) {
    return *reinterpret_cast<T*>(memory_.data() + offset);
  }
  void initialize(int workers);
  WorkerPlace& place_of(size_t worker) { return (&at<WorkerPlace>(sizeof(PartHeader)))[worker]; }
  RuleRecord& rule_record(uint32_t number) { return header().rules[number % PartHeader::kRules]; }

  Layout layout_;
  PartMemory memory_;
};

// A chunk's mutex, held as long as this lives if it could be had at once. Drops a change that a dead process left
// unfinished.
class HeldChunk {
 public:
  HeldChunk(Part& part, size_t chunk, uint32_t actor);
  ~HeldChunk();
  HeldChunk(const HeldChunk&) = delete;
  HeldChunk& operator=(const HeldChunk&) = delete;

  explicit operator bool() const { return is_held_; }

 private:
  void put_back();

  Part& part_;
  const size_t chunk_;
  bool is_held_ = false;
};

// The StageRecord of a worker, held as long as this lives if it could be had at once. Of one thread.
class HeldStage {
 public:
  HeldStage(Part& part, size_t worker);
  ~HeldStage();
  HeldStage(const HeldStage&) = delete;
  HeldStage& operator=(const HeldStage&) = delete;

  explicit operator bool() const { return is_held_; }

 private:
  pthread_mutex_t& mutex_;
  bool is_held_ = false;
};

// A change of a chunk that is held. If this thread does not come to commit(), all is as it was.
class ChunkChange {
 public:
  // Whose records it may change. It keeps these only, so that a push costs the same however many workers there are.
  struct Workers {
    size_t first, count;
  };
  // `arrays`: which ones it writes: bit 0 the value, 1 the master, from 2 on the states. `actor`: takes the journal of
  // this number if it is free. Throws failure where a full /dev/shm has no room.
  ChunkChange(Part& part, size_t chunk, uint32_t actor, uint32_t arrays, Workers workers);
  // Where it writes one of them: all of it, unless the memory is of this process, where no other one sees the middle of
  // a change, and this is where the array is.
  char* to(size_t array) const { return to_[array]; }
  // Copies all of them there, for changes of some elements.
  void copy_arrays();
  // Adds `closes`, for which all wait that wait for a round.
  void commit(uint64_t closes);
  ~ChunkChange();
  ChunkChange(const ChunkChange&) = delete;
  ChunkChange& operator=(const ChunkChange&) = delete;

 private:
  void reserve();
  void begin(Workers workers);

  Part& part_;
  const size_t chunk_;
  const uint32_t arrays_, journal_;
  char* to_[kArrays] = {};
  bool is_open_ = false;
};

// The Parts that a process has: a server those that it keeps, a worker those that it shares with servers of its host.
//
// Any thread.
class PartTable {
 public:
  // Where a server keeps its piece of a key.
  struct Place {
    std::shared_ptr<Part> part;  // null: it has none
    size_t piece = 0;
  };

  // Throws invalid where a key of the store is there already.
  void add(uint32_t store, const std::shared_ptr<Part>& part);
  Place find(uint32_t store, uint32_t key) const;
  // In the order in which they were added.
  std::vector<std::shared_ptr<Part>> parts(uint32_t store) const;

  // Makes the table of a server known to the workers of this process until withdraw(). `identity`: of the server.
  static void announce(uint64_t identity, const std::shared_ptr<PartTable>& table);
  static void withdraw(uint64_t identity);
  // Returns the table of this server if it is one of this process, else null.
  static std::shared_ptr<PartTable> of_server(uint64_t identity);

 private:
  mutable Mutex mutex_;
  std::map<std::pair<uint32_t, uint32_t>, Place> places_ GUARDED_BY(mutex_);
  std::map<uint32_t, std::vector<std::shared_ptr<Part>>> parts_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
