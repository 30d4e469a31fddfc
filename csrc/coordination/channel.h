// How the ranks of the world, or of a process set, talk while they negotiate. A round is one and_bits, perhaps followed
// by one gather and one broadcast; all of them make the same calls. One thread at a time, but for is_called(). Ranks
// are numbered from 0 here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "coordination/gathered.h"
#include "coordination/operation.h"

namespace ringtrain {

// Rows of bits, as the ranks exchange them.

using Words = std::vector<uint64_t>;
constexpr size_t kBitsPerWord = 64;

// How many words hold so many bits.
inline size_t words_for(size_t bits) { return (bits + kBitsPerWord - 1) / kBitsPerWord; }

inline void set_bit(Words& words, size_t bit) { words[bit / kBitsPerWord] |= uint64_t{1} << (bit % kBitsPerWord); }
inline void clear_bit(Words& words, size_t bit) { words[bit / kBitsPerWord] &= ~(uint64_t{1} << (bit % kBitsPerWord)); }

// Calls visit(bit) for each bit that is set, in order.
template <typename Visit>
void for_each_bit(const Words& words, Visit visit) {
  for (size_t i = 0; i < words.size(); ++i)
    for (uint64_t rest = words[i]; rest != 0; rest &= rest - 1)
      visit(static_cast<int>(i * kBitsPerWord) + __builtin_ctzll(rest));
}

// A tensor that is small enough to travel beside the words of a round, and for which slot of the cache it is. A view.
struct Value {
  static constexpr size_t kMostBytes = 64 << 10;

  int32_t slot = -1;  // negative: there is none
  uint32_t bytes = 0;
  const char* data = nullptr;
  const Operation* operation = nullptr;  // of one that a rank puts, if all ranks of the Channel take part in it
};

// Adds up the values of the ranks of each node, so that one of each node travels. Every rank of the nodes calls it.
class NodeSums {
 public:
  virtual ~NodeSums() = default;
  // How long the sum of a node is; 0 where the result would not have the bits that the operation gives when it is
  // carried out. The same on all ranks.
  virtual size_t sum_bytes(const Operation& operation) = 0;
  // Adds up the values that the ranks of this node have put for one slot. Returns the sum at the node's first rank.
  virtual Value add_on_node(const Value& own) = 0;
  // `sums`: of all nodes, in the order of their first ranks, at the first rank of each; elsewhere nothing. Returns
  // their sum, which stays until the next one.
  virtual const void* add_nodes(const Operation& operation, const std::vector<const void*>& sums) = 0;
};

class Channel {
 public:
  Channel(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Channel() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Each bit stays set only if it is set on every rank. As many words on all ranks. In two halves: begin_and gives this
  // rank's words; finish_and waits for the others, calling those who sleep, and returns whether `words` is the result:
  // not if they have not come by `deadline`, for Channels that keep deadlines.
  virtual void begin_and(const Words& words) = 0;
  virtual bool finish_and(Words& words, double deadline) = 0;
  virtual bool keeps_deadlines() const { return false; }
  // Whether the words of a rank, or of its node, go to all others in one hop, also while it does other work between the
  // two and calls go_on() again and again, which waits for nobody.
  virtual bool is_direct() const { return false; }
  virtual void go_on() {}

  // Sets the value that travels with the words of the next begin_and only, on Channels that carry values of so many
  // bytes. It stays in its place until the next exchange.
  virtual size_t most_value_bytes() const { return 0; }
  virtual void put_value(const Value&) {}
  // Returns the value that came with the words of `rank` in the last and_bits; valid until the next exchange.
  virtual Value value_of(int) { return {}; }
  // Has values of several ranks travel as one, their sum. It outlives this.
  virtual void add_by(NodeSums&) {}
  // Returns the slot and the sum of the values of all ranks, if they have come as sums in the last and_bits.
  virtual Value sum_of_all() { return {}; }

  void and_bits(Words& words) {
    begin_and(words);
    finish_and(words, std::numeric_limits<double>::infinity());
  }

  // Whether all ranks say yes.
  bool all_agree(bool yes) {
    Words words = {yes ? ~uint64_t{0} : 0};
    and_bits(words);
    return words.front() != 0;
  }

  // At rank 0: what everybody gave, that of rank_at(place) at each place. Elsewhere nothing.
  virtual Gathered gather(const Bytes& mine) = 0;
  virtual int rank_at(size_t place) const { return static_cast<int>(place); }
  // The same by rank, for what is small.
  std::vector<Bytes> gather_by_rank(const Bytes& mine) {
    std::vector<Bytes> by_rank(static_cast<size_t>(rank_ == 0 ? size_ : 0));
    size_t place = 0;
    gather(mine).for_each(
        [&](const Bytes& message, size_t, size_t) { by_rank[static_cast<size_t>(rank_at(place++))] = message; });
    return by_rank;
  }
  // Everywhere: what rank 0 gave.
  virtual Bytes broadcast(const Bytes& mine) = 0;
  // The same; nothing if the others have not come by `deadline`, for Channels that keep deadlines. Then it is to be
  // called again, with the same bytes.
  virtual std::optional<Gathered> gather_until(double /*deadline*/, const Bytes& mine) { return gather(mine); }
  virtual std::optional<Bytes> broadcast_until(double /*deadline*/, const Bytes& mine) { return broadcast(mine); }

  // Whether somebody has begun the next and_bits, or all have come to the exchange that this rank is in. Those that
  // keep deadlines may be asked by any thread.
  virtual bool is_called() = 0;
  // A deadline that has passed, for an exchange that others may not have come to: this thread does other work and comes
  // back. For Channels that keep deadlines.
  static constexpr double kAtOnce = -std::numeric_limits<double>::infinity();
  // Whether this rank is in an exchange that others have not come to.
  virtual bool is_stuck() const { return false; }
  // Any thread. Whether all others have come, to the next and_bits or the exchange that this rank is in.
  virtual bool have_others_come() const { return false; }
  // While it is stuck: has this rank called when all have come, and calls those that have not.
  virtual void be_called() {}
  virtual void call_late() {}

 private:
  const int rank_;
  const int size_;
};

// The only rank of a world.
class SelfChannel final : public Channel {
 public:
  SelfChannel() : Channel(0, 1) {}
  void begin_and(const Words&) override {}
  bool finish_and(Words&, double) override { return true; }
  bool keeps_deadlines() const override { return true; }
  Gathered gather(const Bytes& mine) override { return Gathered(mine); }
  Bytes broadcast(const Bytes& mine) override { return mine; }
  bool is_called() override { return false; }
};

}  // namespace ringtrain
