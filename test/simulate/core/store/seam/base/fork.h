// Takes the place of csrc/base/fork.h in the simulation of stores: nobody forks, and each simulated process has a pid.
#pragma once

#include "fibres.h"

namespace ringtrain {

class OwnProcess {
 public:
  OwnProcess() {}
  bool is_this() const { return true; }
};

inline int getpid() { return 1000 + simulation::Fibres::current().running_rank(); }

}  // namespace ringtrain
