// Ranks anywhere, over MPI point-to-point messages: as few steps one after the other as there can be, for what is
// small.
#pragma once

#include <memory>
#include <utility>

#include "collectives/network/flat_group.h"
#include "collectives/network/peers.h"

namespace ringtrain {

class DoublingGroup final : public FlatGroup {
 public:
  // `others` has the same ranks and does what reduces nothing. Reductions are halved from `halve_from_bytes` on. A
  // message has at most `chunk_bytes`.
  struct Limits {
    size_t halve_from_bytes, chunk_bytes;
  };
  DoublingGroup(Peers peers, std::unique_ptr<Group> others, const Limits& limits);
  const char* name() const override { return "doubling"; }

  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override { others_->barrier(); }

 private:
  void reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) override;
  void reduce_array(const Reduction& reduction, const Piece& array);

  // Elements of the arrays that are worked on.
  struct Range {
    size_t begin, end;
  };
  void reduce_by_doubling(const Reduction& reduction, size_t count);
  void reduce_by_halving(const Reduction& reduction, size_t count);
  // Sends a range of mine_ and receives into the same place of `into`.
  void exchange(int peer, const Range& out, char* into, const Range& in, size_t element);
  void combine(const Reduction& reduction, bool mine_first, const Range& range);

  // Those that take part in the doubling are numbered from 0.
  bool has_number() const { return rank() >= 2 * extra_ || rank() % 2 == 0; }
  int number() const { return rank() < 2 * extra_ ? rank() / 2 : rank() - extra_; }
  int rank_of(int number) const { return number < extra_ ? 2 * number : number + extra_; }

  Peers peers_;
  const std::unique_ptr<Group> others_;
  const Limits limits_;
  int power_ = 1;  // the largest power of two that is not more than there are ranks
  int extra_;      // how many ranks there are above it
  Scratch mine_, theirs_, whole_;
};

}  // namespace ringtrain
