#include "runtime/weights.h"

#include <cmath>
#include <limits>

namespace ringtrain {
namespace {

// Sums below this have squares that a double holds.
constexpr double kMostExact = 1 << 26;

bool is_small_integer(double weight) { return weight < kMostExact && weight == std::floor(weight); }

// By the inequality of Cauchy and Schwarz, which all numbers here are exact for.
bool are_equal(const WeightSum& sum, int ranks) {
  return sum.weights < kMostExact && ranks * sum.squares == sum.weights * sum.weights;
}

}  // namespace

WeightSum sum_of(double weight) {
  if (!(weight >= 0 && std::isfinite(weight))) weight = std::numeric_limits<double>::quiet_NaN();
  return {weight, is_small_integer(weight) ? weight * weight : std::numeric_limits<double>::infinity()};
}

void sum_over_ranks(Group& group, std::vector<WeightSum>& sums) {
  static_assert(sizeof(WeightSum) == 2 * sizeof(double));
  std::vector<Piece> pieces;  // one each: what shares a plan must not change how it is summed
  for (WeightSum& sum : sums) pieces.push_back({&sum, &sum, 2});
  group.allreduce({DType::float64, Reduce::sum, 1.0}, pieces);
}

std::string trouble_of(const WeightSum& sum) {
  if (sum.weights == 0)
    return "the weights of all ranks are 0, so there is no average. Leave the step out on all ranks, or give at least "
           "one rank a weight above 0.";
  if (!std::isfinite(sum.weights))
    return "the weight of a rank is negative, NaN or infinite, or their sum is infinite. Give the number of samples.";
  return "";
}

Weighting weighting_of(double weight, const WeightSum& sum, int ranks, bool keeps_unit) {
  const double mean = sum.weights / ranks;
  if (keeps_unit || ranks == 1 || are_equal(sum, ranks)) return {weight / mean, static_cast<double>(ranks)};
  const double unit = std::ldexp(1.0, std::ilogb(mean));
  return {weight / unit, sum.weights / unit};
}

}  // namespace ringtrain
