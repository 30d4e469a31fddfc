// Adaptive summation over any Group: Maleki et al., "Scaling Distributed Training with Adaptive Summation",
// arXiv 2006.02924. The essay is in adasum.cc.
#pragma once

#include <vector>

#include "collectives/group.h"

namespace ringtrain {

// Requires Engine::turn_.
class Adasum {
 public:
  // Each piece's destination becomes the adaptive sum of all ranks' sources, times `factor`. Every piece is a vector of
  // its own. A source may be its own destination. All ranks end with the same bits. `dtype` is one of the floats.
  void allreduce(Group& group, DType dtype, double factor, const std::vector<Piece>& pieces);

 private:
  // This rank's slice of a piece, among those of all pieces.
  struct Range {
    size_t begin, count;
  };
  // This rank's slices of each rank's pieces, end to end in rank order, in float32 or float64.
  struct Slices {
    DType dtype;
    char* data;
    size_t count;               // elements of one rank
    std::vector<Range> ranges;  // by piece

    char* at(int rank, size_t begin) const {
      return data + (static_cast<size_t>(rank) * count + begin) * size_of(dtype);
    }
  };

  char* widened(DType dtype, const char* slices, size_t count);
  void climb(Group& group, const Slices& slices, int distance);

  Scratch packed_, slices_, wide_, dots_;
};

}  // namespace ringtrain
