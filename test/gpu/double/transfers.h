// The work of sends and receives of one group, on the thread of a stream: all of them progress together.
#pragma once

#include <vector>

#include "communicator.h"

namespace gpu_double {

struct Transfer {
  bool is_send;
  int peer;
  size_t bytes;
  char* memory;  // as the double sees it
};

// Between two ranks, messages match in the order of the calls. Where the lengths of two that match differ, the error of
// all ranks is set.
void carry_out(Communicator& communicator, const std::vector<Transfer>& transfers);

}  // namespace gpu_double
