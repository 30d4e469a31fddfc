// The direct exchange.
//
// Each slice has an owner, and there are two steps: every rank sends each slice to its owner, who has the values of all
// ranks and can sum them in any order; then every owner sends the sum to all others. So short arrays that travel
// together keep the tree of a doubling, with as few bytes as in a ring. 16-bit floats are summed in float32 and rounded
// once, where in a ring they would be rounded by every rank that they pass, or travel in 32 bits. In both, at
// distance d = 1 .. n - 1, rank r sends to r + d while it receives from r - d (modulo n), chunk by chunk, so at any
// moment nobody is sent to by two. As in the ring each rank sends 2 (n - 1) / n times the array; unlike there it needs
// a connection to everybody.
#include "collectives/network/exchange.h"

#include <utility>

#include "collectives/network/algorithms.h"

namespace ringtrain {
namespace {

size_t others_of(const Endpoint& peers) { return static_cast<size_t>(peers.size() - 1); }

constexpr size_t kOwnSlots = Flow::kWindow + 2;

}  // namespace

Exchange::Exchange(const Endpoint& peers, Phases phases, Order order, const Reduction& reduction, DType source_dtype,
                   Blocks blocks, const Work& work)
    : Pipeline(blocks.size(), 0, phases == Phases::both ? 2 : 1),
      peers_(peers),
      order_(order),
      reduction_(reduction),
      source_dtype_(source_dtype),
      blocks_(std::move(blocks)),
      work_(work),
      others_(others_of(peers)),
      sources_(static_cast<size_t>(peers.size())) {
  lay_out([&](size_t, size_t) { return blocks_.chunks_per_slice() * others_; });
}

size_t Exchange::slots_bytes(const Endpoint& peers, DType source_dtype, size_t chunk_elements) {
  return slots(peers) * chunk_elements * size_of(source_dtype);
}

Blocks::Chunk Exchange::outgoing_chunk(const Position& at) const {
  return blocks_.chunk(at.block, is_summing(at) ? receiver(at) : peers_.rank(), chunk_index(at));
}

Blocks::Chunk Exchange::incoming_chunk(const Position& at) const {
  return blocks_.chunk(at.block, is_summing(at) ? peers_.rank() : sender(at), chunk_index(at));
}

Message Exchange::outgoing(size_t i) {
  const Position it = position_of(i);
  const Blocks::Chunk chunk = outgoing_chunk(it);
  if (!is_summing(it)) return {chunk.destination, chunk.count * size_of(reduction_.dtype), receiver(it)};
  return {const_cast<char*>(chunk.source), chunk.count * size_of(source_dtype_), receiver(it)};  // it is only read
}

Message Exchange::incoming(size_t i) {
  const Position it = position_of(i);
  const Blocks::Chunk chunk = incoming_chunk(it);
  if (!is_summing(it)) return {chunk.destination, chunk.count * size_of(reduction_.dtype), sender(it)};
  return {slot(i), chunk.count * size_of(source_dtype_), sender(it)};
}

void Exchange::arrived(size_t i) {
  const Position it = position_of(i);
  const bool is_last_of_chunk = it.index % others_ == others_ - 1;
  const Blocks::Chunk chunk = incoming_chunk(it);
  if (is_summing(it) && is_last_of_chunk && chunk.count > 0) complete(chunk, i + 1 - others_);
}

void Exchange::sum(const Blocks::Chunk& chunk, size_t first_message) {
  sources_[peers_.rank()] = chunk.source;
  for (size_t i = 0; i < others_; ++i)
    sources_[peers_.wrap(peers_.rank() - 1 - static_cast<int>(i))] = slot(first_message + i);
  void* destination = chunk.destination;
  if (order_ == Order::tree)
    return reduce_by_tree(reduction_, source_dtype_, sources_, destination, chunk.count, work_.sums);
  if (source_dtype_ == reduction_.dtype)
    return reduce(reduction_, &destination, 1, sources_.data(), peers_.size(), chunk.count);
  void* wide = work_.sums.get(chunk.count * sizeof(float));
  reduce({DType::float32, reduction_.reduce, 1.0}, &wide, 1, sources_.data(), peers_.size(), chunk.count);
  narrow(reduction_.dtype, reduction_.scale, destination, static_cast<const float*>(wide), chunk.count);
}

size_t Exchange::needs_arrived(const Position& to_send) const {
  return first_message(to_send.block, 0) + chunk_index(to_send) * others_ + others_ - 1;
}

// A sum overwrites what this rank has contributed to it.
bool Exchange::is_free(const Position& incoming, size_t sent) const {
  if (is_summing(incoming)) return true;
  const size_t distance_back = static_cast<size_t>(peers_.size() - distance(incoming));
  return first_message(incoming.block, 0) + chunk_index(incoming) * others_ + distance_back - 1 < sent;
}

NarrowExchange::NarrowExchange(const Endpoint& peers, Order order, const Reduction& reduction, Blocks blocks,
                               const Work& work)
    : Exchange(peers, Phases::both, order, reduction, reduction.dtype, blocks, work),
      chunk_bytes_(blocks.chunk_elements() * size_of(reduction.dtype)),
      own_slots_(work.slots + Exchange::slots_bytes(peers, reduction.dtype, blocks.chunk_elements())) {}

size_t NarrowExchange::slots_bytes(const Endpoint& peers, DType wire, size_t chunk_elements) {
  return Exchange::slots_bytes(peers, wire, chunk_elements) + kOwnSlots * chunk_elements * size_of(wire);
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

Message MadeParts::message(size_t i, int owner, int peer) const {
  const Chunk part = chunk_of(bytes_, part_bytes_, part_of(i));
  return {all_ + static_cast<size_t>(owner) * bytes_ + part.offset, part.count, peer};
}

Message MadeParts::outgoing(size_t i) {
  make_up_to(part_of(i));
  return message(i, peers_.rank(), peers_.wrap(peers_.rank() + distance_of(i)));
}

Message MadeParts::incoming(size_t i) {
  const int peer = peers_.wrap(peers_.rank() - distance_of(i));
  return message(i, peer, peer);
}

void MadeParts::arrived(size_t i) {
  if ((i + 1) % others_ != 0) return;
  make_up_to(part_of(i));
  const Chunk part = chunk_of(bytes_, part_bytes_, part_of(i));
  parts_.use(part.offset, part.count);
}

void MadeParts::make_up_to(size_t part) {
  for (; made_ <= part; ++made_) {
    const Chunk next = chunk_of(bytes_, part_bytes_, made_);
    parts_.make(next.offset, next.count);
  }
}

}  // namespace ringtrain
