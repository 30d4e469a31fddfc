// The messages of a reduce-scatter by halving, of an allgather by doubling, or of one after the other. The essay is in
// halving.cc.
#pragma once

#include <algorithm>
#include <vector>

#include "collectives/network/pipeline.h"

namespace ringtrain {

class Halving final : public Pipeline {
 public:
  // In what an array is, travels and is added up: one dtype in all of this, unless there are 16-bit floats.
  struct Dtypes {
    DType source;
    DType contribution;  // in which a source travels to the rank that adds it
    DType sum;           // in which sums travel on their way to their owner
    DType result;        // in which a sum travels from its owner to the others
    DType destination;

    // Of sources of another dtype than the reduction where these are sums of 16-bit floats already.
    static Dtypes of(DType source, DType reduced);
    // Of float32 that travels in 16 bits.
    static Dtypes narrowed(DType wire);
  };

  // Rank r owns slice r, as in a Ring (see there). `slots` is slots_bytes() long.
  Halving(const Endpoint& peers, Phases phases, const Dtypes& dtypes, const Reduction& reduction,
          std::vector<Block> blocks, size_t chunk_elements, char* slots);

  static size_t slots_bytes(const Endpoint& peers, const Dtypes& dtypes, const std::vector<Block>& blocks,
                            size_t chunk_elements);

  Message outgoing(size_t i) override;
  Message incoming(size_t i) override;
  void arrived(size_t i) override;

 private:
  // Slices that follow each other in the circle of the ranks; 0: that of this rank, 1: of the next one, and so on.
  struct Slices {
    int begin, end;
  };
  // Elements of a block, whose end is followed by its beginning.
  struct Range {
    size_t begin, count;
  };

  bool is_free(const Position& incoming, size_t sent) const override;
  size_t needs_arrived(const Position& to_send) const override {
    return end_message(to_send.block, to_send.step - 1) - 1;
  }

  bool is_summing(size_t step) const { return step < half_; }
  // How far the partners of a step are from each other in the circle.
  int distance(size_t step) const { return 1 << (is_summing(step) ? half_ - 1 - step : step - half_); }
  Slices sent(size_t step) const;
  Slices received(size_t step) const;
  Range range_of(size_t block, const Slices& slices) const;
  size_t chunks_in(size_t block, const Slices& slices) const {
    return chunks_of(range_of(block, slices).count, chunk_elements_);
  }
  Range chunk(size_t block, const Slices& slices, size_t index) const;
  bool wraps(size_t block, const Range& range) const { return range.begin + range.count > totals_[block]; }
  // Calls visit(part, elements before it) for one part, or for two where the end of the block is between.
  template <typename Visit>
  void for_each_part_of(size_t block, const Range& range, Visit visit) const {
    const size_t before_end = std::min(range.count, totals_[block] - range.begin);
    if (before_end > 0) visit(Range{range.begin, before_end}, size_t{0});
    if (before_end < range.count) visit(Range{0, range.count - before_end}, before_end);
  }

  DType travels_as(size_t step) const;
  char* source(const Position& at, const Range& range) const;  // only read
  char* destination(const Position& at, const Range& range) const;
  char* sum(const Position& at, const Range& range) const;
  // For what arrives, for what leaves, and for what is being added.
  char* slot(size_t number) const { return slots_ + number * slot_bytes_; }
  char* slot_in(size_t i) const { return slot(i % Flow::kWindow); }
  char* slot_out(size_t i) const { return slot(Flow::kWindow + i % Flow::kWindow); }
  char* wide_slot() const { return slot(2 * Flow::kWindow); }
  char* narrow_slot() const { return slot(2 * Flow::kWindow + 1); }
  static constexpr size_t kSlots = 2 * Flow::kWindow + 2;

  bool goes_to_its_place(const Position& at, const Range& range) const;
  // The contribution of this rank becomes a sum.
  void take_rest(const Position& at);
  void take(const Position& at, const Range& range);
  void add(const Position& at, const Range& range, const char* arrived);
  // A sum becomes a result.
  void finish(const Position& at, const Range& range);

  // How many blocks have sums at a time.
  static size_t sums_of(int ranks, size_t blocks);

  const Endpoint& peers_;
  const Dtypes dtypes_;
  const Reduction reduction_;
  const std::vector<Block> blocks_;
  const size_t chunk_elements_, slot_bytes_;
  const size_t half_;            // steps of a reduce-scatter, or of an allgather
  std::vector<Counts> offsets_;  // of the slices of each block
  Counts totals_;                // elements of each block
  char* const slots_;
  size_t longest_block_ = 0;  // elements
};

}  // namespace ringtrain
