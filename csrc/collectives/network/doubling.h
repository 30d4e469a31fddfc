// Allreduce in as few steps one after the other as there can be, for what is small. The essay is in doubling.cc.
#pragma once

#include <cstddef>

#include "collectives/group.h"
#include "collectives/network/pipeline.h"

namespace ringtrain {

// Where it works: of this rank's sums, and of those that come in.
struct DoublingMemory {
  Scratch &mine, &theirs;
};

// A message has at most `chunk_bytes`.
void allreduce_by_doubling(Endpoint& peers, const Reduction& reduction, const Piece& array, size_t chunk_bytes,
                           const DoublingMemory& memory);

}  // namespace ringtrain
