// What Groups share that can only reduce one contiguous array: small pieces are packed together, large ones are reduced
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
  // The reduction of one array in place.
  virtual void allreduce_in_place(const Reduction& reduction, void* data, size_t count) = 0;

  void give_up_packed() { packed_.give_up(); }

 private:
  void allreduce_packed(const Reduction& reduction, const std::vector<Piece>& pieces, size_t count);

  Scratch packed_;
};

}  // namespace ringtrain
