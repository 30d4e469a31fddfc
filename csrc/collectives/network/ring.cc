// The ring.
//
// n ranks stand in a ring. Each sends only to its right neighbour and receives only from its left one. A block is cut
// into n slices, and the work is done in steps.
//
// Reduce-scatter, steps 0 to n - 2: in step s rank r sends slice r - s - 1 to the right and receives slice r - s - 2
// from the left, to which it adds its own values (all modulo n). The sum it made in one step is what it
// sends in the next. After the last step it has the complete sum of slice r. So each slice travels once round the ring
// and every rank adds its share as it passes.
//
// Allgather, steps n - 1 to 2 n - 3: goes on in the same way, r - s - 1 to the right and r - s - 2 from the left, but
// what comes in is complete and only kept.
//
// Each rank sends 2 (n - 1) / n times the array, the least that any allreduce can do. For both directions of every link
// to be busy all the time, nothing may stand between the steps, the parts or the blocks: a slice is cut into chunks,
// chunk c of a step may be sent as soon as chunk c of the step before has arrived and been added, and meanwhile the
// chunks of other blocks are under way (pipeline.h).
//
// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
#include "collectives/network/ring.h"

#include <utility>

namespace ringtrain {
namespace {

size_t first_step_of(Phases phases, size_t others) { return phases == Phases::allgather ? others : 0; }
size_t end_step_of(Phases phases, size_t others) { return phases == Phases::reduce_scatter ? others : 2 * others; }
size_t others_of(const Endpoint& peers) { return static_cast<size_t>(peers.size() - 1); }

}  // namespace

Ring::Ring(const Endpoint& peers, Phases phases, const Reduction& reduction, Blocks blocks, char* slots)
    : Pipeline(blocks.size(), first_step_of(phases, others_of(peers)), end_step_of(phases, others_of(peers))),
      peers_(peers),
      reduction_(reduction),
      blocks_(std::move(blocks)),
      slots_(slots),
      element_(size_of(reduction.dtype)),
      others_(others_of(peers)) {
  lay_out([&](size_t, size_t) { return blocks_.chunks_per_slice(); });
}

Blocks::Chunk Ring::chunk(const Position& at, size_t steps_back) const {
  return blocks_.chunk(at.block, peers_.wrap(peers_.rank() - 1 - static_cast<int>(steps_back)), at.index);
}

Message Ring::outgoing(size_t i) {
  const Position it = position_of(i);
  const Blocks::Chunk chunk = outgoing_chunk(it);
  char* data = it.step == 0 ? const_cast<char*>(chunk.source) : chunk.destination;  // it is only read
  return {data, chunk.count * element_, peers_.wrap(peers_.rank() + 1)};
}

Message Ring::incoming(size_t i) {
  const Position it = position_of(i);
  const Blocks::Chunk chunk = incoming_chunk(it);
  return {is_reducing(it.step) ? slot(i) : chunk.destination, chunk.count * element_, peers_.wrap(peers_.rank() - 1)};
}

void Ring::arrived(size_t i) {
  const Position it = position_of(i);
  if (!is_reducing(it.step)) return;
  const Blocks::Chunk chunk = incoming_chunk(it);
  Reduction reduction = reduction_;
  if (it.step + 1 < others_) reduction.scale = 1.0;  // the last one scales
  const void* sources[] = {slot(i), chunk.source};
  void* destination = chunk.destination;
  if (chunk.count > 0) reduce(reduction, &destination, 1, sources, 2, chunk.count);
}

// The chunk that arrives during the allgather overwrites the one sent n - 1 steps before.
bool Ring::is_free(const Position& incoming, size_t sent) const {
  return incoming.step < first_step() + others_ ||
         first_message(incoming.block, incoming.step - others_) + incoming.index < sent;
}

}  // namespace ringtrain
