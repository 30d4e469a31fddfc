// The ranks of a Group, reached by MPI messages of one tag.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "base/wait.h"
#include "network/mpi.h"

namespace ringtrain {

// A piece of memory that goes to a rank of the Group, or comes from it. Empty ones are not sent: both sides know the
// sizes.
struct Message {
  char* data = nullptr;
  size_t bytes = 0;
  int peer = 0;
};

class Messages;

// Requires Engine::turn_.
class Peers {
 public:
  // `ranks`: of mpi.world(), this one at `rank`; `tag` keeps this Group's messages apart. `mpi` and `watch` outlive
  // this.
  Peers(Mpi& mpi, std::vector<int> ranks, int rank, int tag, Watch& watch)
      : mpi_(mpi), ranks_(std::move(ranks)), rank_(rank), tag_(tag), watch_(watch) {}

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  // A number of the Group for any number, counted round in the circle of the ranks.
  int wrap(int rank) const { return ((rank % size()) + size()) % size(); }
  Mpi& mpi() const { return mpi_; }
  // Of these ranks alone; all of them call it at the same time.
  MpiCommunicator make_communicator() { return mpi_.create(mpi_.world(), ranks_, tag_, watch_); }

  MpiRequest send(const Message& message) {
    return mpi_.isend(message.data, message.bytes, ranks_[message.peer], tag_, mpi_.world());
  }
  MpiRequest receive(const Message& message) {
    return mpi_.irecv(message.data, message.bytes, ranks_[message.peer], tag_, mpi_.world());
  }

  // All of them, from the first to the last.
  void run(Messages& messages);
  // One message each way, cut into chunks.
  void exchange(const Message& outgoing, const Message& incoming, size_t chunk_bytes);

  template <typename Ready>
  void wait_until(Ready ready) {
    waiter_.poll(ready, &watch_);
  }
  // advance() returns how many messages of a stream are over.
  template <typename Advance>
  void wait_for_some(Advance advance, Pace& pace) {
    waiter_.poll_stream(advance, pace, &watch_);
  }

 private:
  Mpi& mpi_;
  const std::vector<int> ranks_;
  const int rank_;
  const int tag_;
  Watch& watch_;
  Waiter waiter_;
};

}  // namespace ringtrain
