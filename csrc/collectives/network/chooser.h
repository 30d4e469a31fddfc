// The algorithm of a reduction among ranks of which each has a link of its own: the one that should be done first.
//
// All ranks must choose alike, so the choice depends on nothing but what they have agreed on: their number, the bytes
// of the reduction, and options. Bits must not depend on what shares a plan with an array, which follows from timing:
// the order in which the values of the ranks are added up is a function of the array alone, and arrays of one order
// take the fastest way that keeps it. `python -m ringtrain.doctor --algorithms` prints it, and `python -m
// ringtrain.bench scaling` predicts by it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/options.h"
#include "kernels/reduce.h"

namespace ringtrain {

enum class Way { doubling, halving, ring, exchange, library };

// In which order the values of the ranks are added up.
enum class Order {
  any,      // all orders have the same bits, or MPI chooses one
  ranks,    // rank 0, 1, 2 and so on
  tree,     // of a doubling, whatever the place of an element in its array
  halving,  // that of a Halving: from the owner of the element on
  ring,     // likewise
};

// Whether an element's owner, and so its place in its array, matters.
inline bool has_owners(Order order) { return order == Order::halving || order == Order::ring; }

// Of an allreduce of one array, the same whatever it shares a plan with.
struct Summing {
  Order order = Order::any;
  bool is_narrowed = false;  // whether it travels in 16 bits, though it is not of such

  bool operator==(const Summing& other) const { return order == other.order && is_narrowed == other.is_narrowed; }
};

// Calls visit(kind, arrays) for all arrays of each kind, in the order of the first ones.
template <typename Array, typename KindOf, typename Visit>
void for_each_kind(const std::vector<Array>& arrays, KindOf kind_of, Visit visit) {
  std::vector<std::pair<decltype(kind_of(arrays.front())), std::vector<Array>>> kinds;
  for (const Array& array : arrays) {
    const auto kind = kind_of(array);
    auto it = std::find_if(kinds.begin(), kinds.end(), [&](const auto& entry) { return entry.first == kind; });
    if (it == kinds.end()) it = kinds.insert(it, {kind, {}});
    it->second.push_back(array);
  }
  for (const auto& [kind, some] : kinds) visit(kind, some);
}

// A message takes hop_s, with what both ends do for it, and bytes / bytes_per_s.
struct Link {
  double hop_s = 0, bytes_per_s = 0;
};
Link link_of(const Options& options);

// An array of so many bytes on each of so many ranks. Sums of 16-bit floats are float32.
struct ReducedArray {
  size_t ranks, bytes;
  bool is_16_bit = false;
};

// Of an allreduce; not of the library. The essay is in chooser.cc.
double allreduce_s(Way way, const ReducedArray& array, const Link& link);
// How many others a rank sends to, or receives from.
size_t connections(Way way, size_t ranks);
const char* name_of(Way way);

// For the ranks of one NetworkGroup.
class Chooser {
 public:
  struct Setup {
    std::string algorithm;        // as the option allreduce_algorithm
    DType wire = DType::float32;  // in which long sums of float32 travel
    Link link;
    bool is_even = true;    // whether all links are as fast
    bool by_ranks = false;  // whether floats are added up in the order of the ranks
  };
  // `tuning`, which all ranks may change between operations, outlives this.
  Chooser(Setup setup, size_t ranks, const Tuning& tuning)
      : setup_(std::move(setup)), ranks_(ranks), tuning_(&tuning) {}

  // Of one array: by the algorithm, by Tuning::ring_from_bytes, or else the fastest.
  Way for_allreduce(const Reduction& reduction, size_t count) const;
  // `in_blocks`: whether it goes in blocks also where a doubling would be faster.
  Summing summing(const Reduction& reduction, size_t count, bool in_blocks = false) const;
  // Of arrays that are summed so, with so many elements together.
  Way for_summing(const Summing& summing, const Reduction& reduction, size_t count) const;
  // The same, but neither a doubling nor the library, which take no blocks. Nothing where no other way has that order.
  std::optional<Way> for_blocks(const Summing& summing, const Reduction& reduction, size_t count) const;
  // Of one array. The order of a sum that a rank gets follows from the rank and the way.
  Way for_reduce_scatter(const Reduction& reduction, size_t count) const;
  // Whether all ways have the same bits.
  bool has_one_order(const Reduction& reduction) const;
  // Whether the values of the ranks are added up in the order of the ranks, as an option wants.
  bool adds_by_ranks(const Reduction& reduction) const;
  Way for_allgather(size_t bytes) const;
  double hop_s() const { return setup_.link.hop_s; }
  // Whether parts that no rank adds up may go to all others at once.
  bool may_exchange() const { return long_way(true) == Way::exchange; }
  // Whether short arrays that only move take few steps: a ring that an option asks for is taken for all sizes.
  bool has_short_moves() const { return setup_.algorithm != "ring"; }

  // Whether this travels in 16 bits, though it is not of such, unless it is short.
  bool is_narrowed(const Reduction& reduction) const;
  // After how many messages, one after the other, a block is there.
  size_t steps(Way way) const;

  struct Choice {
    size_t from_bytes;
    Way way;
  };
  // By size: where way_of(bytes) changes, to 1 KB.
  static std::vector<Choice> choices(const std::function<Way(size_t)>& way_of);

  // The library was faster: for short arrays, or for all.
  void prefer_library(bool for_all);

 private:
  Way of_size(const Reduction& reduction, size_t count) const;
  Way way(size_t bytes, bool is_16_bit) const;
  // Of what is too long for a doubling.
  Way long_way(bool is_16_bit) const;
  // Of halving and exchange those that add up as a doubling.
  std::vector<Way> long_ways_of_tree(const Reduction& reduction) const;
  Way fastest(const std::vector<Way>& ways, const ReducedArray& array) const;
  // From how many bytes on the long way is taken; nothing where the fastest one is.
  std::optional<size_t> long_from_bytes() const;

  Setup setup_;
  size_t ranks_;
  const Tuning* tuning_;
  bool is_library_short_ = false;
};

}  // namespace ringtrain
