// The memory that the ranks of one communicator share, and waiting in it.
//
// All of it begins as zeros. Only the pages that are used take memory, and they are gone with the last rank, whatever
// it dies of. Nobody spins: ranks sleep on the words of the segment (futex), at most 50 ms, since the one who would
// wake them may be dead.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "cuda.h"

namespace gpu_double {

constexpr int kMostRanks = 32;
constexpr size_t kChunkBytes = 256 << 10;
constexpr size_t kMailBytes = 64 << 10;

using Word = std::atomic<uint32_t>;

// The fields that ranks must agree on before a collective.
struct Descriptor {
  uint32_t kind, type, op, root;
  uint64_t count;

  bool operator==(const Descriptor& other) const {
    return kind == other.kind && type == other.type && op == other.op && root == other.root && count == other.count;
  }
};

// A file without a name: the descriptor of a process that has it open.
struct Place {
  int pid, descriptor;
};

// Of this process.
Place new_place();
// Does nothing to the place of another process.
void release(const Place& place);

struct SplitWish {
  int color, key;
  Place place;  // the first rank's is the one that is used
};

// Two of all that is exchanged in rounds: a rank writes for the next round while another one still reads.
struct RankSlot {
  Word has_joined;
  Word bell;  // counts what happened to the mailboxes of this rank
  CUuuid uuid;
  SplitWish wishes[2];
  Descriptor descriptors[2];
  alignas(4096) char chunks[2][kChunkBytes];
};

// From one rank to another, one chunk of a message at a time. It is full while the two counts differ.
struct Mailbox {
  Word written, taken;
  uint64_t message_bytes;
  alignas(4096) char chunk[kMailBytes];
};

struct Shared {
  Word size;
  Word joined;
  Word arrived_on_streams;  // at the end of a round of collectives
  Word arrived_on_hosts;    // the same for splits
  Word arrived_in_calls;    // the same for calls for collectives, where they have handshakes
  Word error;               // the first that concerns all ranks
  RankSlot ranks[kMostRanks];
  Mailbox mail[kMostRanks][kMostRanks];  // from, to
};

// Asked again and again while a rank waits; throws what ends the wait.
using Patience = std::function<void()>;

void sleep_while(const Word& word, uint32_t value);
void wake_all(Word& word);

// All `size` ranks have called it for this round, counted from 0. They call it for all rounds in turn.
void meet(Word& arrived, uint32_t round, int size, const Patience& patience);

class Segment {
 public:
  // Returns when `size` ranks have joined, which need the place no longer: it is released. Refuses a rank
  // that is there already.
  Segment(const Place& place, int rank, int size, const CUuuid& uuid, const Patience& patience);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Shared* operator->() const { return shared_; }

 private:
  Shared* const shared_;
};

}  // namespace gpu_double
