// The calls between ncclGroupStart and ncclGroupEnd of a thread; a call outside of them is a group of its own.
#pragma once

#include <memory>

#include "collective.h"
#include "transfers.h"

namespace gpu_double {

// The request of one call to a communicator.
struct Operation {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Stream> stream;
  bool is_transfer;
  Collective collective;  // meaningless for a transfer
  Transfer transfer;      // meaningless for a collective
};

void begin_group();
// Launches all that was submitted. Refuses with the first error of the group, in which case nothing is launched, and
// where no group was begun.
void end_group();
void submit(const Operation& operation);
// A call of the group was refused.
void fail_group(int code);
// ncclGroupEnd was refused: what the group had is forgotten.
void drop_group();

}  // namespace gpu_double
