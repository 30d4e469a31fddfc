// What Groups share that can only reduce contiguous arrays: small pieces are packed together, large ones are reduced
// where they lie.
#pragma once

#include "collectives/group.h"
#include "collectives/scratch.h"

namespace ringtrain {

class FlatGroup : public Group {
 public:
  using Group::Group;

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) final;

 protected:
  // Arrays that are worth an operation of their own; at least one, none of them empty.
  virtual void reduce_arrays(const Reduction& reduction, const std::vector<Piece>& arrays) = 0;

 private:
  Scratch packed_;
};

}  // namespace ringtrain
