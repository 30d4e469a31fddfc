// Bad news between ranks that share no memory: who cannot go on tells all others once, and they hear of it while they
// wait.
#pragma once

#include <string>

#include "base/error.h"
#include "network/mpi.h"

namespace ringtrain {

// Engine thread only.
class Alarm {
 public:
  // `tag` of mpi.world() is for alarms alone. `mpi` outlives this.
  Alarm(Mpi& mpi, int rank, int size, int tag) : mpi_(mpi), rank_(rank), size_(size), tag_(tag) {}

  // Tells all others, and gives the message a moment to leave. Does nothing if this rank has only heard it itself.
  void raise(ErrorKind kind, const std::string& message) noexcept;

  // Throws what another rank has raised. Lets MPI make progress too, which some libraries do only when they are called:
  // what this rank has sent before might not leave otherwise.
  void listen();

 private:
  struct Message {
    uint32_t length;
    ErrorKind kind;
    char text[kLongestErrorText];
  };

  // Whether MPI is through with it, or cannot carry it out.
  bool is_over(MpiRequest& request);

  Mpi& mpi_;
  const int rank_, size_, tag_;
  bool has_heard_ = false;
};

}  // namespace ringtrain
