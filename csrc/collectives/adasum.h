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
  // A part of a piece that is in this rank's slice of all pieces.
  struct Range {
    size_t piece, begin, count;  // begin: in the slice
  };
  static std::vector<Range> ranges_of(const std::vector<Piece>& pieces, size_t slice_begin, size_t slice_count);

  // This rank's slice of each rank's pieces, end to end in rank order, in float32 or float64.
  struct Slices {
    DType dtype;
    char* data;
    size_t count;  // elements of one
    size_t pieces;
    std::vector<Range> ranges;

    char* at(int rank, size_t begin) const {
      return data + (static_cast<size_t>(rank) * count + begin) * size_of(dtype);
    }
  };

  char* widened(DType dtype, const char* slices, size_t count);
  void climb(Group& group, const Slices& slices, int distance);

  Scratch packed_, slices_, wide_, dots_;
};

}  // namespace ringtrain
