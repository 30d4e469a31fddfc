// Rank 0 of a large world alone: its real Coordinator, with the messages that the tree brings it from the other ranks,
// so that what it costs can be measured for any number of them.
#pragma once

#include <memory>
#include <vector>

#include "coordination/coordinator.h"

namespace ringtrain {

double processor_s();  // of this thread

class Crowd {
 public:
  Crowd(int size, const Coordinator::Limits& limits);
  ~Crowd();

  // The share of this rank in a round.
  struct Cost {
    double seconds;          // of the processor
    size_t messages, bytes;  // received and sent
    size_t peak_bytes;       // more memory than before the round, at most
    size_t agreed;
  };
  // One round in which the ranks have something new: rank r submits the requests number r modulo their count.
  Cost settle(const std::vector<std::vector<RequestPtr>>& fresh);
  // One in which all ranks repeat these, which all know.
  Cost repeat(const std::vector<RequestPtr>& fresh);

  // All ranks wait from now on.
  void say_blocked() { blockage_.say(true); }

 private:
  class Tree;
  Cost round(const std::vector<RequestPtr>& fresh);

  const std::unique_ptr<Tree> tree_;
  Membership membership_;
  Blockage blockage_;
  std::unique_ptr<Coordinator> coordinator_;
};

}  // namespace ringtrain
