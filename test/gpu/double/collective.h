// The work of the collectives, on the thread of a stream: chunk by chunk through the slots of the segment.
#pragma once

#include "communicator.h"

namespace gpu_double {

enum class Kind : uint32_t { allreduce, reduce, reduce_scatter, allgather, broadcast };

struct Collective {
  Kind kind;
  Type type;
  Reduction reduction;
  bool is_scaled;
  Scalar scalar;  // of this rank
  int root;
  size_t count;      // as NCCL's call has it
  const char* send;  // as the double sees it; null where this rank sends nothing
  char* receive;     // null where this rank receives nothing
};

// Sets the error of all ranks, and does nothing else, where they do not call the same.
void carry_out(Communicator& communicator, const Collective& collective);

}  // namespace gpu_double
