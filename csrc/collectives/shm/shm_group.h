// Ranks of one node, through shared memory.
//
// No large buffer is shared. Each pair of ranks has a mailbox of a size that stays in cache, several deep, and data
// streams through: an allreduce is a pipeline of three stages over chunks of the virtual layout of all tensors,
//   put   copy the slices that other ranks own from my tensors into my mailboxes for them;
//   sum   for the slice that I own: combine the peers' mailboxes with my own private slice in rank order, scale, write
//         my tensor, and overwrite those same mailbox lines with the result;
//   get   copy the results from my own mailboxes to my tensors.
// A chunk is one slice per rank. Every cache line is exchanged by two ranks only. Each stage advances a counter; a rank
// does whatever stage is ready, the latest stage first. Data that fits into one small slot takes a shorter way: each
// rank writes its own, waits for all, and combines all in rank order.
//
// Arrays that are in the Arena need no mailboxes: each rank reads its slice of all ranks' arrays and writes the result
// to all of them, so that every array is read once and written once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/options.h"
#include "base/wait.h"
#include "collectives/group.h"
#include "collectives/piece_layout.h"
#include "kernels/copy.h"
#include "memory/arena.h"
#include "memory/shm.h"

namespace ringtrain {

// Arrays of which every rank has a part: for each rank its parts of all arrays as one stream, which is never copied
// together. Parts are counted in bytes or in elements.
class PartStreams {
 public:
  // `counts`: by array, and there by rank.
  PartStreams(std::vector<Counts> counts, int size) : counts_(std::move(counts)), totals_(static_cast<size_t>(size)) {
    offsets_.reserve(counts_.size());
    for (const Counts& of_array : counts_) {
      offsets_.push_back(offsets_of(of_array));
      for (size_t rank = 0; rank < totals_.size(); ++rank) totals_[rank] += of_array[rank];
    }
  }

  // Of the rank that has most.
  size_t longest() const { return *std::max_element(totals_.begin(), totals_.end()); }

  // How far one rank's stream has come.
  struct Cursor {
    size_t array = 0;
    size_t within = 0;  // the rank's part of this array
    size_t done = 0;
  };
  bool is_at_end(const Cursor& cursor, int rank) const { return cursor.done == totals_[static_cast<size_t>(rank)]; }

  // Part of a rank's stream that is in one array, and where it begins: in the array, in the rank's part of the array,
  // and within the `most` of for_next().
  struct Stretch {
    size_t array, in_array, in_part, offset, count;
  };
  // Calls visit(stretch) for the next `most` of a rank's stream.
  template <typename Visit>
  void for_next(Cursor& cursor, int rank, size_t most, Visit visit) const {
    const auto of = static_cast<size_t>(rank);
    for (size_t offset = 0; offset < most && !is_at_end(cursor, rank);) {
      const size_t part = counts_[cursor.array][of], count = std::min(most - offset, part - cursor.within);
      if (count > 0)
        visit(Stretch{cursor.array, offsets_[cursor.array][of] + cursor.within, cursor.within, offset, count});
      offset += count;
      cursor.done += count;
      cursor.within += count;
      if (cursor.within < part) continue;
      ++cursor.array;
      cursor.within = 0;
    }
  }

 private:
  const std::vector<Counts> counts_;
  std::vector<Counts> offsets_;  // of the ranks' parts in each array
  Counts totals_;                // by rank
};

// How a segment of mailboxes is divided; the same on all ranks that share it.
struct MailboxGeometry {
  int size = 0;  // ranks
  size_t mailbox_bytes = 0;
  int depth = 0;  // how many chunks are under way at once

  // Keeps all mailboxes together under half of a usual last-level cache. `cores`: that all ranks of the node can keep
  // busy at the same time.
  static MailboxGeometry of(int size, size_t largest_mailbox_bytes, int cores);
  size_t row_bytes() const { return static_cast<size_t>(size - 1) * mailbox_bytes; }
  // Of all rows of a rank.
  size_t rows_bytes() const { return static_cast<size_t>(depth) * row_bytes(); }
};

// The memory that the ranks of a Group share on this node.
struct NodeMemory {
  SharedSegment mailboxes;  // zero at first
  MailboxGeometry geometry;
  Arena* arena = nullptr;          // null where there is none
  std::vector<int> arena_members;  // by rank of the Group on this node
};

class ShmGroup final : public Group {
 public:
  // Of the segment that holds the mailboxes, and of its beginning, which every operation needs. Each rank reserves its
  // own part of the rest before its first operation that needs it, since few of many groups have one.
  static size_t segment_bytes(const MailboxGeometry& geometry);
  static size_t reserved_bytes(const MailboxGeometry& geometry);
  static AlgorithmChoices choices();

  // All references and the arena outlive this.
  ShmGroup(NodeMemory memory, int rank, const Tuning& tuning, Watch& watch);
  const char* name() const override { return "shm"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void allreduce_registered(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  bool reduce_values(const Reduction& reduction, const Sources& sources, void* destination, size_t count) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                      const Counts& counts) override {
    reduce_scatter_all(reduction, {{source, destination, counts}});
  }
  void reduce_scatter_all(const Reduction& reduction, const std::vector<Scattering>& arrays) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override {
    allgather_all({{source, destination, bytes}});
  }
  void allgather_all(const std::vector<Gathering>& arrays) override;
  void broadcast(void* data, size_t bytes, int root) override { broadcast_all({{data, data, bytes}}, root); }
  void broadcast_all(const std::vector<Piece>& pieces, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override;
  Levels levels() override { return {this, nullptr, 1, 1}; }

 private:
  friend class ShmAllreduce;

  struct Control {
    // Chunks for which this rank has completed the stage, over the life of the Group.
    alignas(64) Flag put;
    alignas(64) Flag summed;
    alignas(64) Flag got;
    alignas(64) Flag small;  // small operations for which this rank has written its slot
  };

  Control& control(int rank) { return reinterpret_cast<Control*>(memory_.mailboxes.data())[rank]; }
  // Where `from` leaves data of chunk number `chunk` for `to`.
  char* mailbox(int from, int to, uint32_t chunk);
  // All mailboxes of `from` for one chunk as one piece of memory, row_bytes() long, for what everybody reads.
  char* row(int from, uint32_t chunk);
  // Of a small operation with so many bytes.
  char* small_slot(int rank, uint32_t number, size_t bytes);
  char* own_slot(uint32_t number, size_t bytes);

  // Of the segment: memory of each rank, one after the other.
  struct Part {
    size_t first, bytes;       // of rank 0
    bool is_reserved = false;  // this rank's own
  };
  char* of_rank(const Part& part, int rank) {
    return memory_.mailboxes.data() + part.first + static_cast<size_t>(rank) * part.bytes;
  }
  // Throws failure where /dev/shm is full.
  void reserve_own(Part& part);

  // A rank for which the stage has not got so far, or -1.
  int who_has_not(Flag Control::* stage, uint32_t count);
  void wait_for_all(Flag Control::* stage, uint32_t count);
  void wait_for(Flag& flag, uint32_t count) { waiter_.wait(flag, count, &watch_); }

  // The slot of `chunk` is free once everybody has got the chunk that used it before.
  uint32_t got_before(uint32_t chunk) const { return chunk + 1 - static_cast<uint32_t>(memory_.geometry.depth); }

  // Everybody puts chunk k and, one chunk later, gets it: the skeleton of all that does not reduce.
  template <typename Put, typename Get>
  void stream(size_t chunks, Put put, Get get);

  void small_allreduce(const Reduction& reduction, const std::vector<Piece>& pieces);
  // Everybody shows the others where its pieces are: the address of each for this rank, by rank.
  std::vector<std::vector<char*>> exchange_places(const Piece* first, size_t count);
  void reduce_own_slice(const Reduction& reduction, const Piece* first, size_t count);

  NodeMemory memory_;
  Part slots_, rows_;
  const Tuning& tuning_;
  Watch& watch_;
  Waiter waiter_;
  std::vector<CopyForOthers> copies_;  // into the mailboxes for each rank, and into own rows
  uint32_t next_chunk_ = 0;            // number of the next chunk; the same on all ranks between operations
  uint32_t small_number_ = 0;          // small operations so far
};

// One allreduce of a ShmGroup: the three-stage pipeline described in shm_group.h, from the first chunk to the last.
class ShmAllreduce {
 public:
  ShmAllreduce(ShmGroup& group, const Reduction& reduction, const PieceLayout& layout);
  void run();

 private:
  using Control = ShmGroup::Control;

  // The elements of chunk k that `owner` sums.
  struct Slice {
    size_t begin;
    size_t count;
  };
  Slice slice(size_t k, int owner) const;
  uint32_t number(size_t k) const { return first_ + static_cast<uint32_t>(k); }

  bool can_put() const;
  bool can_sum() const;
  bool can_get() const;
  void put();
  void sum();
  void get();
  void wait_for_what_is_next();

  ShmGroup& group_;
  const Reduction& reduction_;
  const PieceLayout& layout_;
  const size_t element_;  // bytes
  const int rank_, size_;
  const size_t chunk_;   // elements of one chunk: a mailbox for every rank
  const size_t chunks_;  // how many there are
  const uint32_t first_;

  size_t put_ = 0, summed_ = 0, got_ = 0;  // chunks that this rank has completed each stage for

  std::vector<PieceLayout::Cursor> put_cursors_, get_cursors_;  // one per owner of a slice
  PieceLayout::Cursor sum_cursor_;
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
};

}  // namespace ringtrain
