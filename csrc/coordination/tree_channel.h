// A Channel over a Wire in which no rank handles more than O(log size) messages per call.
//
// and_bits runs by dissemination: in step k every rank sends what it knows to rank + 2^k and receives from rank - 2^k;
// since "and" may be applied twice, this is right for every number of ranks. gather and broadcast use a binomial tree.
// Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
#pragma once

#include "coordination/channel.h"
#include "coordination/wire.h"

namespace ringtrain {

class TreeChannel final : public Channel {
 public:
  // `patience_s`: how long to wait for the others to come to a round by themselves before they are called; infinity
  // where they surely come.
  TreeChannel(Wire& wire, double patience_s)
      : Channel(wire.rank(), wire.size()), wire_(wire), patience_s_(patience_s) {}

  void and_bits(Words& words) override;
  std::vector<Bytes> gather(const Bytes& mine) override;
  Bytes broadcast(const Bytes& mine) override;

  // A round that somebody begins is noticed by those who poll, so there is nothing to do before its first message.
  void call() override {}
  bool is_called() override;

 private:
  void call_neighbours();
  void send(int to, Tag tag, const Bytes& bytes);
  Bytes receive(int from, Tag tag);

  Wire& wire_;
  const double patience_s_;
  uint64_t round_ = 0;  // calls of and_bits so far
};

}  // namespace ringtrain
