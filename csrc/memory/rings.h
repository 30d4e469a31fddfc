// Rings of memory in the node's segment, one from each rank of the node to each other one, for words between the two.
//
// Where a node has few ranks a long message fits into a ring, so that its sender need not wait for the receiver in the
// middle of it: each such wait lasts for milliseconds where other programs run on the cores. A long ring that is empty
// begins at its first byte again, so short messages stay in the cache and need few pages, which a ring gets as they are
// used. A rank that has put something into a ring calls the other one: it sets a bit of the other's call, which that
// one looks at, and rings its bell. A caller that waits for a message sleeps on that; the doorbell of the node wakes
// the thread on the lookout, which would only be in the way of the caller.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/wait.h"
#include "kernels/copy.h"
#include "memory/shm.h"

namespace ringtrain {

// Requires Engine::turn_.
class Rings {
 public:
  // Of the part of the segment that has pages at once, and of all.
  static size_t reserved_bytes(int size) { return static_cast<size_t>(size) * words(size) * sizeof(uint64_t); }
  static size_t bytes(int size);

  // `begin`: where they begin in the segment, a multiple of 64. The segment outlives this.
  Rings(SharedSegment& segment, size_t begin, int size, int index);

  // Of what is put at once.
  size_t most_bytes() const { return capacity_ / 4; }
  // Puts two parts, one behind the other. False where there is no room: this rank is called when there is.
  bool put(int to, const void* head, size_t head_bytes, const void* data, size_t bytes);

  // Whether another rank has called since take_callers().
  bool is_called() const;
  // Calls handle(member) for each of them.
  template <typename Handle>
  void take_callers(Handle handle) {
    for (size_t word = 0; word < call_words(); ++word) {
      std::atomic<uint64_t>& call = call_of(index_)[word];
      if (call.load(std::memory_order_relaxed) == 0) continue;
      uint64_t bits = call.exchange(0, std::memory_order_acq_rel);
      // A caller that still saw its bit does not ring: what it has put before must be seen from here on.
      std::atomic_thread_fence(std::memory_order_seq_cst);
      for (; bits != 0; bits &= bits - 1) handle(static_cast<int>(64 * word) + __builtin_ctzll(bits));
    }
  }
  // Calls handle(data, bytes) for all that `from` has put, and tell_room() where `from` waits for room.
  template <typename Handle, typename TellRoom>
  void take(int from, Handle handle, TellRoom tell_room) {
    Ring& ring = this->ring(from, index_);
    uint64_t taken = ring.taken.load(std::memory_order_relaxed);
    const uint64_t before = taken;
    const auto tell = [&] {
      if (ring.wants_room.load(std::memory_order_seq_cst) != 0 && ring.wants_room.exchange(0) != 0) tell_room();
    };
    while (taken != ring.put.load(std::memory_order_acquire)) {
      const char* const place = data_of(ring) + taken % capacity_;
      const auto bytes = *reinterpret_cast<const uint64_t*>(place);
      if (bytes == kSkip) {
        taken += capacity_ - taken % capacity_;
      } else {
        handle(place + sizeof(uint64_t), static_cast<size_t>(bytes));
        taken += room_for(bytes);
      }
      ring.taken.store(taken, std::memory_order_release);
      tell();
    }
    if (taken == before) return;
    // Either `from`, which now says that it wants room, is seen here, or it sees the room.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    tell();
  }
  // Sets this rank's bit of the other's call, and rings its bell. Whether its doorbell is to be rung, too.
  bool call(int to);
  // Any thread. This rank's.
  Flag& bell() const { return bells_of(index_).bell; }
  // Whether others are to ring this rank's doorbell. A look at is_called() has to follow.
  void let_others_ring(bool ring) { bells_of(index_).rings_doorbell.store(ring ? 1 : 0, std::memory_order_seq_cst); }

 private:
  static constexpr uint64_t kSkip = ~uint64_t{0};  // in the place of a length: the rest of the ring is empty
  struct Ring {
    alignas(64) std::atomic<uint64_t> put;    // bytes so far
    alignas(64) std::atomic<uint64_t> taken;  // bytes so far
    alignas(64) std::atomic<uint32_t> wants_room;
  };

  static constexpr size_t kLine = 8;  // words in a cache line
  struct alignas(64) Bells {
    Flag bell;
    std::atomic<uint32_t> rings_doorbell;
  };

  // Of a call, in whole cache lines; behind them one for Bells.
  static size_t words(int size) { return (static_cast<size_t>(size) + 511) / 512 * kLine + kLine; }
  size_t call_words() const { return (static_cast<size_t>(size_) + 63) / 64; }
  static size_t capacity(int size);
  static size_t room_for(size_t bytes) { return sizeof(uint64_t) + (bytes + 7) / 8 * 8; }
  static size_t first_ring(int size);
  size_t offset_of(int from, int to) const;
  Ring& ring(int from, int to) { return *reinterpret_cast<Ring*>(segment_.data() + offset_of(from, to)); }
  // So many bytes of the ring to that member, from the first on.
  void reserve(int to, size_t bytes);
  static char* data_of(Ring& ring) { return reinterpret_cast<char*>(&ring + 1); }
  std::atomic<uint64_t>* call_of(int member) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(segment_.data() + begin_) +
           static_cast<size_t>(member) * words(size_);
  }
  Bells& bells_of(int member) const { return *reinterpret_cast<Bells*>(call_of(member) + words(size_) - kLine); }

  SharedSegment& segment_;
  const size_t begin_;
  const int size_, index_;
  const size_t capacity_;
  std::vector<CopyForOthers> copies_;  // into the ring to each member
  std::vector<size_t> reserved_;       // bytes of the ring to each member that have pages
  std::vector<uint64_t> seen_taken_;   // how far each member had taken what is in that when this rank last looked
};

}  // namespace ringtrain
