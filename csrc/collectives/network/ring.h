// The messages of a ring: reduce-scatter, allgather, or one after the other. The essay is in ring.cc.
#pragma once

#include "collectives/network/pipeline.h"

namespace ringtrain {

class Ring final : public Pipeline {
 public:
  // Rank r owns slice r: its sum ends up there, and from there it is gathered. Partial sums go to the destinations, so
  // a reduce_scatter leaves rubbish in the slices of others; an allgather looks at no source. `slots` is slots_bytes()
  // long.
  Ring(const Endpoint& peers, Phases phases, const Reduction& reduction, Blocks blocks, char* slots);

  // For incoming chunks before they are added.
  static size_t slots_bytes(size_t chunk_bytes) { return Flow::kWindow * chunk_bytes; }

  Message outgoing(size_t i) override;
  Message incoming(size_t i) override;
  void arrived(size_t i) override;

 private:
  bool is_free(const Position& incoming, size_t sent) const override;
  size_t needs_arrived(const Position& to_send) const override {
    return first_message(to_send.block, to_send.step - 1) + to_send.index;
  }
  Blocks::Chunk outgoing_chunk(const Position& at) const { return chunk(at, at.step); }
  Blocks::Chunk incoming_chunk(const Position& at) const { return chunk(at, at.step + 1); }
  Blocks::Chunk chunk(const Position& at, size_t steps_back) const;
  bool is_reducing(size_t step) const { return step < others_; }
  char* slot(size_t i) { return slots_ + i % Flow::kWindow * blocks_.chunk_elements() * element_; }

  const Endpoint& peers_;
  const Reduction reduction_;
  const Blocks blocks_;
  char* const slots_;
  const size_t element_;  // bytes
  const size_t others_;   // how many other ranks there are, which is the number of steps of each part
};

}  // namespace ringtrain
