// The messages of an allreduce of float32 that travels in 16 bits.
//
// As in the exchange, every slice has an owner. What a rank contributes to a slice is rounded to 16 bits on its way
// there; the owner, too, takes its own rounded, sums them in float32 in the order of the ranks and rounds the sum,
// which is what travels back. So all ranks have the same bits: those that an allreduce of the rounded arrays has.
#pragma once

#include "collectives/network/exchange.h"

namespace ringtrain {

class NarrowExchange final : public Exchange {
 public:
  // Sources and destinations of `blocks` are float32, `reduction` a sum of the 16-bit floats that travel. `slots` is
  // slots_bytes() long.
  NarrowExchange(const Endpoint& peers, const Reduction& reduction, Blocks blocks, char* slots);

  static size_t slots_bytes(const Endpoint& peers, size_t chunk_elements);

  Message outgoing(size_t i) override;
  Message incoming(size_t i) override;
  void arrived(size_t i) override;

 private:
  void complete(const Blocks::Chunk& chunk, size_t first_message) override;
  char* own_slot(size_t number) { return own_slots_ + number * chunk_bytes_; }

  const size_t chunk_bytes_;  // of a chunk on its way
  char* const own_slots_;     // of what is being sent, and two more
};

}  // namespace ringtrain
