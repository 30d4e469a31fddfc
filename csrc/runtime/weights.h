// Averages by weight: sum(weight * tensor) / sum(weight) over the ranks, whose weights are numbers of samples, say.
//
// Ranks agree that an operation is weighted, not on the weights: those change in every step, and an agreement that is
// in the cache says nothing of them. So the ranks sum the weights of a plan first, as one small float64 allreduce, and
// each multiplies its tensors before they are reduced. The division is one factor of the reduction, as that of any
// average.
#pragma once

#include <string>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

// Of one operation, the weights of all ranks: the same bits on all of them.
struct WeightSum {
  double weights = 0;
  double squares = 0;  // infinite if a weight is not a small integer, whose squares have exact sums
};

// Returns the part of one rank in the sum, which is NaN for a weight that is negative, NaN or infinite.
WeightSum sum_of(double weight);

// Replaces each of them by its sum over the ranks.
void sum_over_ranks(Group& group, std::vector<WeightSum>& sums);

// For a message: why these weights have no average. Empty if they have one.
std::string trouble_of(const WeightSum& sum);

// How one operation uses the weights.
struct Weighting {
  double factor = 1;   // multiplies the tensors of this rank before they are reduced; 0: they are not even read
  double divisor = 1;  // divides the sum, on all ranks alike
};

// Factors are about 1, whatever unit weights have, so that a sum has the range of an unweighted one. They are powers of
// two of the weights, so that products of integers stay exact; weights that are all equal have factors of 1 and give
// the bits of the unweighted average. `keeps_unit`: the mean of the factors is 1, for what compares sums with a
// threshold.
Weighting weighting_of(double weight, const WeightSum& sum, int ranks, bool keeps_unit);

}  // namespace ringtrain
