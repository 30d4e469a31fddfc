// A Wire over MPI point-to-point messages.
#pragma once

#include <list>
#include <vector>

#include "base/wait.h"
#include "coordination/wire.h"
#include "network/mpi.h"

namespace ringtrain {

class MpiWire final : public Wire {
 public:
  // `ranks`: of mpi.world(), in the order of this wire. `first_tag`: MPI tags from here to first_tag + 6 belong to this
  // wire. `mpi` and `watch` outlive this.
  MpiWire(Mpi& mpi, std::vector<int> ranks, int rank, int first_tag, Watch& watch)
      : mpi_(mpi), ranks_(std::move(ranks)), rank_(rank), first_tag_(first_tag), watch_(watch) {}
  ~MpiWire() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }

  void send(int to, Tag tag, const void* data, size_t bytes) override;
  void receive(int from, Tag tag, void* data, size_t bytes) override;
  void receive_from_any(Tag tag, void* data, size_t bytes) override;
  bool has_arrived(Tag tag) override;
  bool arrives_within(int from, Tag tag, double seconds) override;

 private:
  int mpi_tag(Tag tag) const { return first_tag_ + static_cast<int>(tag); }
  void receive_from(int rank, Tag tag, void* data, size_t bytes);  // of mpi_.world()
  void forget_sent();

  Mpi& mpi_;
  const std::vector<int> ranks_;
  const int rank_;
  const int first_tag_;
  Watch& watch_;
  Waiter waiter_;
  std::list<MpiRequest> outgoing_;
};

}  // namespace ringtrain
