// The messages of an allreduce whose values go straight to the rank that sums them. The essay is in exchange.cc.
#pragma once

#include <vector>

#include "collectives/group.h"
#include "collectives/network/chooser.h"
#include "collectives/network/pipeline.h"

namespace ringtrain {

class Exchange : public Pipeline {
 public:
  // Where it works: `slots`, for what arrives, is slots_bytes() long.
  struct Work {
    char* slots;
    Scratch& sums;
  };
  // Rank r owns slice r, and adds up in this order: that of a tree, or else of the ranks. Sources are of the
  // reduction's dtype, or float32 where that is a 16-bit float and they are sums already. Never the allgather alone.
  Exchange(const Endpoint& peers, Phases phases, Order order, const Reduction& reduction, DType source_dtype,
           Blocks blocks, const Work& work);

  static size_t slots_bytes(const Endpoint& peers, DType source_dtype, size_t chunk_elements);

  Message outgoing(size_t i) override;
  Message incoming(size_t i) override;
  void arrived(size_t i) override;

 protected:
  bool is_summing(const Position& at) const { return at.step == 0; }
  // Chunk by chunk, and within a chunk the others by their distance.
  size_t chunk_index(const Position& at) const { return at.index / others_; }
  int receiver(const Position& at) const { return peers_.wrap(peers_.rank() + distance(at)); }
  int sender(const Position& at) const { return peers_.wrap(peers_.rank() - distance(at)); }
  // The data that is sent, and the data that arrives.
  Blocks::Chunk outgoing_chunk(const Position& at) const;
  Blocks::Chunk incoming_chunk(const Position& at) const;
  DType dtype() const { return reduction_.dtype; }
  // Where message i arrives that does not go to its place at once.
  char* slot(size_t i) { return work_.slots + i % slots(peers_) * blocks_.chunk_elements() * size_of(source_dtype_); }
  // From this rank's source to its destination, and the others' contributions from their slots.
  void sum(const Blocks::Chunk& chunk, size_t first_message);

 private:
  bool is_free(const Position& incoming, size_t sent) const override;
  size_t needs_arrived(const Position& to_send) const override;
  int distance(const Position& at) const { return static_cast<int>(at.index % others_) + 1; }
  // Called when all contributions to a chunk of this rank's slice are there.
  virtual void complete(const Blocks::Chunk& chunk, size_t first_message) { sum(chunk, first_message); }

  static size_t slots(const Endpoint& peers) { return Flow::kWindow + static_cast<size_t>(peers.size() - 1); }

  const Endpoint& peers_;
  const Order order_;
  const Reduction reduction_;
  const DType source_dtype_;
  const Blocks blocks_;
  const Work work_;
  const size_t others_;
  Sources sources_;
};

// The messages of an allreduce of float32 that travels in 16 bits.
//
// As in the exchange, every slice has an owner. The contribution of a rank to a slice is rounded to 16 bits on its way
// there; the owner, too, takes its own rounded, sums them in float32 and rounds the sum, which is what travels back. So
// all ranks have the same bits: those that an allreduce of the rounded arrays has.
class NarrowExchange final : public Exchange {
 public:
  // Sources and destinations of `blocks` are float32, `reduction` a sum of the 16-bit floats that travel.
  NarrowExchange(const Endpoint& peers, Order order, const Reduction& reduction, Blocks blocks, const Work& work);

  static size_t slots_bytes(const Endpoint& peers, DType wire, size_t chunk_elements);

  Message outgoing(size_t i) override;
  Message incoming(size_t i) override;
  void arrived(size_t i) override;

 private:
  void complete(const Blocks::Chunk& chunk, size_t first_message) override;
  char* own_slot(size_t number) { return own_slots_ + number * chunk_bytes_; }

  const size_t chunk_bytes_;  // of a chunk on its way
  char* const own_slots_;     // of what is being sent, and two more
};

// The messages of an allgather of what is made while it is sent: each part goes straight to every other rank.
class MadeParts final : public Messages {
 public:
  // As Group::allgather_parts, all of which outlives this.
  MadeParts(const Endpoint& peers, const Group::Parts& parts, char* all, size_t bytes, size_t part_bytes)
      : peers_(peers),
        parts_(parts),
        all_(all),
        bytes_(bytes),
        part_bytes_(part_bytes),
        others_(static_cast<size_t>(peers.size() - 1)) {}

  size_t count() const override { return chunks_of(bytes_, part_bytes_) * others_; }
  Message outgoing(size_t i) override;
  Message incoming(size_t i) override;
  void arrived(size_t i) override;

 private:
  // All other ranks get a part before any gets the next one.
  size_t part_of(size_t i) const { return i / others_; }
  int distance_of(size_t i) const { return static_cast<int>(i % others_) + 1; }
  Message message(size_t i, int owner, int peer) const;
  // A part of others may be there before this rank has sent its own.
  void make_up_to(size_t part);

  const Endpoint& peers_;
  const Group::Parts& parts_;
  char* const all_;
  const size_t bytes_, part_bytes_, others_;
  size_t made_ = 0;  // parts
};

}  // namespace ringtrain
