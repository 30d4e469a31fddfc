// The collectives that a library has itself: the vendor knows its network.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/dtype.h"
#include "base/wait.h"
#include "network/network.h"

namespace ringtrain {

// Ranks that call the library's collectives together. Calls return at once, as those of the Network do, which outlives
// this; Network::test() tells when one has ended.
class LibraryCommunicator {
 public:
  virtual ~LibraryCommunicator() = default;

  // In place. dtype: not a 16-bit float.
  virtual NetworkRequest iallreduce(void* data, int count, DType dtype, Reduce reduce) = 0;
};

class LibraryCollectives {
 public:
  virtual ~LibraryCollectives() = default;

  // Whether it says that it does not take addresses of GPUs. Not every library that does not says so.
  virtual bool denies_cuda() const = 0;

  // Called by exactly these ranks of the world, in this order, at the same time. It may block inside; where the Watch
  // throws meanwhile, the call is left to itself.
  virtual std::unique_ptr<LibraryCommunicator> connect(const std::vector<int>& ranks, int tag, Watch& watch) = 0;

  // Frees the communicators that nobody has any more, which their ranks must do together: all of them at the same time,
  // in the order in which they were let go of; not after an error. It may wait for the others.
  virtual void free_unused(Watch& watch) = 0;
};

}  // namespace ringtrain
