#include "collectives/network/narrow_exchange.h"

#include <utility>

namespace ringtrain {
namespace {

constexpr size_t kOwnSlots = Flow::kWindow + 2;

}  // namespace

NarrowExchange::NarrowExchange(const Endpoint& peers, const Reduction& reduction, Blocks blocks, char* slots)
    : Exchange(peers, Phases::both, reduction, reduction.dtype, blocks, slots),
      chunk_bytes_(blocks.chunk_elements() * size_of(reduction.dtype)),
      own_slots_(slots + Exchange::slots_bytes(peers, blocks.chunk_elements())) {}

size_t NarrowExchange::slots_bytes(const Endpoint& peers, size_t chunk_elements) {
  constexpr size_t kHalfBytes = 2;
  return Exchange::slots_bytes(peers, chunk_elements) + kOwnSlots * chunk_elements * kHalfBytes;
}

// A sum is rounded already.
Message NarrowExchange::outgoing(size_t i) {
  const Position it = position_of(i);
  const Blocks::Chunk chunk = outgoing_chunk(it);
  char* place = own_slot(i % Flow::kWindow);
  const char* wide = is_summing(it) ? chunk.source : chunk.destination;
  narrow(dtype(), 1.0, place, reinterpret_cast<const float*>(wide), chunk.count);
  return {place, chunk.count * size_of(dtype()), receiver(it)};
}

Message NarrowExchange::incoming(size_t i) {
  const Position it = position_of(i);
  return {slot(i), incoming_chunk(it).count * size_of(dtype()), sender(it)};
}

void NarrowExchange::arrived(size_t i) {
  const Position it = position_of(i);
  if (is_summing(it)) return Exchange::arrived(i);
  const Blocks::Chunk chunk = incoming_chunk(it);
  widen(dtype(), reinterpret_cast<float*>(chunk.destination), slot(i), chunk.count);
}

void NarrowExchange::complete(const Blocks::Chunk& chunk, size_t first_message) {
  char *own = own_slot(Flow::kWindow), *total = own_slot(Flow::kWindow + 1);
  narrow(dtype(), 1.0, own, reinterpret_cast<const float*>(chunk.source), chunk.count);
  sum({own, total, chunk.count}, first_message);
  widen(dtype(), reinterpret_cast<float*>(chunk.destination), total, chunk.count);
}

}  // namespace ringtrain
