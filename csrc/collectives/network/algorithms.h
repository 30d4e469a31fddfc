// The algorithms of a NetworkGroup that take no Pipeline (see pipeline.h): doubling.cc has the first one, with its
// essay, and tree.cc the others, each with its source.
#pragma once

#include <cstddef>

#include "collectives/group.h"
#include "collectives/network/pipeline.h"
#include "collectives/piece_layout.h"

namespace ringtrain {

// Where it works: of this rank's sums, and of those that come in.
struct DoublingMemory {
  Scratch &mine, &theirs;
};

// A message has at most `chunk_bytes`.
void allreduce_by_doubling(Endpoint& peers, const Reduction& reduction, const Piece& array, size_t chunk_bytes,
                           const DoublingMemory& memory);
// Reduces an array from the sources of all ranks, to the same bits. They are of the reduction's dtype, or float32 where
// that is a 16-bit float.
void reduce_by_tree(const Reduction& reduction, DType source_dtype, const Sources& sources, void* destination,
                    size_t count, Scratch& sums);

// From rank `data.peer`, in a binomial tree: log2(n) steps, each with all of the data.
void broadcast_by_tree(Endpoint& peers, const Message& data);
// From neighbour to neighbour, chunk by chunk, so that all links are busy at the same time. The layout is one of bytes.
// `slots` is chain_slots_bytes() long.
void broadcast_by_chain(Endpoint& peers, const PieceLayout& layout, int root, size_t chunk_bytes, char* slots);
size_t chain_slots_bytes(size_t chunk_bytes);

// Every rank hears from 1, 2, 4, .. ranks before it. `token`: for a byte each way.
void barrier_by_dissemination(Endpoint& peers, Scratch& token);

}  // namespace ringtrain
