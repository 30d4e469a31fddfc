// Allreduce by MPI's own collectives.
//
// Only a non-blocking call is used and tested for completion, since the blocking ones of the usual libraries spin.
#pragma once

#include <memory>

#include "collectives/group.h"
#include "network/endpoint.h"
#include "network/network.h"

namespace ringtrain {

class Library {
 public:
  // All of the peers construct it at the same time. `peers` outlives this.
  explicit Library(Endpoint& peers);

  // MPI does not define the smallest of a number and NaN, nor a sum that overflows: Open MPI returns the largest value
  // of an integer of 8 or 16 bits instead of wrapping.
  static bool can(const Reduction& reduction) {
    const bool compares = reduction.reduce == Reduce::min || reduction.reduce == Reduce::max;
    if (is_float(reduction.dtype)) return !compares;
    return compares || reduction.dtype == DType::boolean || size_of(reduction.dtype) > 2;
  }

  // 16-bit floats, which MPI cannot add, travel as float32.
  void allreduce(const Reduction& reduction, const Piece& array);
  // Without a factor, and not of 16-bit floats; of a GPU where the library takes its addresses.
  void allreduce_in_place(const Reduction& reduction, void* data, size_t count);

 private:
  Endpoint& peers_;
  const std::unique_ptr<LibraryCommunicator> communicator_;
  Scratch wide_;
};

}  // namespace ringtrain
