// How the ranks of the world talk while they negotiate. A round is one and_bits, perhaps followed by one gather and one
// broadcast; all ranks make the same calls. Engine thread only.
#pragma once

#include <cstdint>
#include <vector>

#include "base/bytes.h"

namespace ringtrain {

using Words = std::vector<uint64_t>;

class Channel {
 public:
  Channel(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Channel() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Each bit stays set only if it is set on every rank. As many words on all ranks.
  virtual void and_bits(Words& words) = 0;
  // At rank 0: what everybody gave, by rank. Elsewhere nothing.
  virtual std::vector<Bytes> gather(const Bytes& mine) = 0;
  // Everywhere: what rank 0 gave.
  virtual Bytes broadcast(const Bytes& mine) = 0;

  // Asks the ranks that sleep to come to the next and_bits.
  virtual void call() = 0;
  // Whether somebody has asked for the next and_bits, or is already in it.
  virtual bool is_called() = 0;

 private:
  const int rank_;
  const int size_;
};

// The only rank of a world.
class SelfChannel final : public Channel {
 public:
  SelfChannel() : Channel(0, 1) {}
  void and_bits(Words&) override {}
  std::vector<Bytes> gather(const Bytes& mine) override { return {mine}; }
  Bytes broadcast(const Bytes& mine) override { return mine; }
  void call() override {}
  bool is_called() override { return false; }
};

}  // namespace ringtrain
