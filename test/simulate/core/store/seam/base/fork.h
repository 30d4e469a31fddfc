// Takes the place of csrc/base/fork.h in the simulation of stores: nobody forks, and each simulated process has a pid.
#pragma once

#include "fibres.h"

namespace ringtrain {

class OwnProcess {
 public:
  OwnProcess() {}
  bool is_this() const { return true; }
};

constexpr int kPidOfRank0 = 1000;
inline int getpid() { return kPidOfRank0 + simulation::Fibres::current().running_rank(); }

}  // namespace ringtrain
