// How long an allreduce takes: S bytes among n ranks, L = ceil(log2 n), messages of h seconds, links of B bytes/s.
//
// | way | messages one after the other | bytes through a link | connections of a rank |
// | --- | --- | --- | --- |
// | doubling | L (two more if n is no power of two) | L S | L |
// | halving | 2 L | 2 S | 2 L |
// | ring | 2 (n - 1) | 2 S | 2 |
// | exchange | 2, but n - 1 at a time in each | 2 S | n - 1 |
//
// Sums of 16-bit floats have twice the bytes in doubling, and 2.5 S in halving; a ring would round them n times.
//
// The other terms are measured. Doubling adds the array in each step while its link is idle. Halving changes partners:
// some of each block is not overlapped, and on a long link the connection to a partner that was idle sends 64 KB, 128
// KB and so on in its first round trips, where a ring keeps to one connection.
#include "collectives/network/chooser.h"

#include <cmath>

#include "base/error.h"
#include "collectives/network/library.h"

namespace ringtrain {
namespace {

// More connections than this are too many for one operation: `ulimit -n` is 1,024 on most hosts, also of large jobs.
constexpr size_t kMostExchanging = 33;

constexpr double kAddedPerSecond = 4e9;    // bytes
constexpr double kFirstWindow = 64 << 10;  // bytes
constexpr double kHopsToDouble = 0.98;     // a window. Not at all where it has grown before: fewer steps win a tie
constexpr double kNotOverlapped = 0.25;    // of the bytes of a halving
constexpr double kHopOfMany = 0.6;         // hops of a message, of which several are under way
constexpr double kChunks_s = 8e-6;         // of the chunks of a slice that follow the first one

double steps_of_doubling(size_t ranks) {
  const double power = std::floor(std::log2(static_cast<double>(ranks)));
  return power + (std::exp2(power) < static_cast<double>(ranks) ? 2 : 0);
}

double steps_of_halving(size_t ranks) { return std::ceil(std::log2(static_cast<double>(ranks))); }

// The smaller one of 0 and -0 follows from the order of two.
bool commutes(const Reduction& reduction) {
  return reduction.reduce == Reduce::sum || reduction.reduce == Reduce::product;
}

// Hops in which the window of a connection grows to `bytes`, or to all that fits on the link.
double hops_to_grow(double bytes, const Link& link) {
  return kHopsToDouble * std::log2(std::max(1.0, std::min(bytes, link.hop_s * link.bytes_per_s) / kFirstWindow));
}

}  // namespace

Link link_of(const Options& options) {
  constexpr double kMicro = 1e-6, kGigabit = 1e9 / 8;
  return {options.link_hop_us * kMicro, options.link_gbit * kGigabit};
}

double allreduce_s(Way way, const ReducedArray& array, const Link& link) {
  if (array.ranks < 2) return 0;
  const auto ranks = static_cast<double>(array.ranks), bytes = static_cast<double>(array.bytes);
  const double others = ranks - 1, share = 2 * others / ranks * bytes;
  const double summed = array.is_16_bit ? 2 * bytes : bytes;
  switch (way) {
    case Way::doubling: {
      const double steps = steps_of_doubling(array.ranks);
      const double hops = 1 + hops_to_grow(summed, link);
      return steps * (hops * link.hop_s + summed / link.bytes_per_s) + (steps + 2) * summed / kAddedPerSecond;
    }
    case Way::halving: {
      const double steps = steps_of_halving(array.ranks);
      double to_grow = 0, in_step = summed / 2;
      for (double step = 0; step < steps; ++step, in_step /= 2) to_grow += hops_to_grow(in_step, link);
      const double sent = (array.is_16_bit ? 1.25 : 1) * share * (1 + kNotOverlapped);
      return 2 * (steps + to_grow) * link.hop_s + sent / link.bytes_per_s;
    }
    case Way::ring:
      return 2 * others * (link.hop_s + kChunks_s) + hops_to_grow(bytes / ranks, link) * link.hop_s +
             share / link.bytes_per_s;
    case Way::exchange:
      return 2 * (1 + others * kHopOfMany) * link.hop_s + share / link.bytes_per_s;
    case Way::library:
      break;
  }
  throw failure("the time of an allreduce by MPI is not known");
}

size_t connections(Way way, size_t ranks) {
  if (ranks < 2) return 0;
  const auto half = static_cast<size_t>(steps_of_halving(ranks));
  switch (way) {
    case Way::doubling:
      return half;
    case Way::halving:  // the farthest partners of a power of two are the same rank
      return 2 * half - (size_t{1} << half == ranks ? 1 : 0);
    case Way::ring:
      return std::min(ranks - 1, size_t{2});
    case Way::exchange:
    case Way::library:
      break;
  }
  return ranks - 1;
}

const char* name_of(Way way) {
  switch (way) {
    case Way::doubling:
      return "recursive doubling";
    case Way::halving:
      return "halving and doubling";
    case Way::ring:
      return "ring";
    case Way::exchange:
      return "exchange";
    case Way::library:
      break;
  }
  return "that of MPI";
}

bool Chooser::is_narrowed(const Reduction& reduction) const {
  return is_half(setup_.wire) && reduction.dtype == DType::float32 && reduction.reduce == Reduce::sum;
}

Way Chooser::of_size(const Reduction& reduction, size_t count) const {
  const bool is_16_bit = is_half(reduction.dtype);
  const Way chosen = way(count * size_of(reduction.dtype), is_16_bit);
  return chosen == Way::library && !Library::can(reduction) ? long_way(is_16_bit) : chosen;
}

Way Chooser::for_allreduce(const Reduction& reduction, size_t count) const {
  return for_summing(summing(reduction, count), reduction, count);
}

// A doubling takes no slices.
Way Chooser::for_reduce_scatter(const Reduction& reduction, size_t count) const {
  if (adds_by_ranks(reduction)) return Way::exchange;
  const Way chosen = of_size(reduction, count);
  return chosen == Way::doubling ? Way::halving : chosen;
}

Summing Chooser::summing(const Reduction& reduction, size_t count, bool in_blocks) const {
  const bool is_any = has_one_order(reduction);
  if (is_any && !is_narrowed(reduction)) return {};
  Way alone = of_size(reduction, count);
  const bool is_library = alone == Way::library;
  const bool is_long = (alone != Way::doubling || in_blocks) && !is_library;
  const bool is_narrowed = is_long && this->is_narrowed(reduction);
  if (is_any) return {Order::any, is_narrowed};
  if (setup_.by_ranks) return {Order::ranks, is_narrowed};
  if (is_library) return {};
  if (is_narrowed) alone = long_way(true);
  if (alone == Way::ring) return {Order::ring, is_narrowed};
  const std::vector<Way> ways = long_ways_of_tree(reduction);
  const bool is_tree = alone == Way::doubling || std::find(ways.begin(), ways.end(), alone) != ways.end();
  return {is_tree ? Order::tree : Order::halving, is_narrowed};
}

Way Chooser::for_summing(const Summing& summing, const Reduction& reduction, size_t count) const {
  if (summing.order == Order::ranks) return Way::exchange;
  if (summing.is_narrowed) return long_way(true);
  if (summing.order == Order::halving) return Way::halving;
  if (summing.order == Order::ring) return Way::ring;
  const Way alone = of_size(reduction, count);
  if (summing.order != Order::tree || alone == Way::doubling) return alone;
  const std::vector<Way> ways = long_ways_of_tree(reduction);
  if (ways.empty()) return Way::doubling;
  if (std::find(ways.begin(), ways.end(), alone) != ways.end()) return alone;
  return fastest(ways, {ranks_, count * size_of(reduction.dtype), is_half(reduction.dtype)});
}

std::optional<Way> Chooser::for_blocks(const Summing& summing, const Reduction& reduction, size_t count) const {
  const Way chosen = for_summing(summing, reduction, count);
  if (chosen != Way::doubling && chosen != Way::library) return chosen;
  if (summing.order == Order::any) return chosen == Way::library ? long_way(is_half(reduction.dtype)) : Way::halving;
  const std::vector<Way> ways = long_ways_of_tree(reduction);
  return ways.empty() ? std::nullopt : std::optional(ways.front());
}

// Integers have the same bits in all orders, and two ranks have one order only.
bool Chooser::has_one_order(const Reduction& reduction) const {
  return !is_float(reduction.dtype) || (ranks_ <= 2 && commutes(reduction));
}

bool Chooser::adds_by_ranks(const Reduction& reduction) const { return setup_.by_ranks && !has_one_order(reduction); }

// The d-th ranks before all owners make the same pairs where their number is a power of two, and each step pairs the
// sums of the one before: the tree of a doubling, but for the order within a pair. An exchange can add up in any order.
std::vector<Way> Chooser::long_ways_of_tree(const Reduction& reduction) const {
  std::vector<Way> ways;
  if (commutes(reduction) && (ranks_ & (ranks_ - 1)) == 0) ways.push_back(Way::halving);
  if (ranks_ <= kMostExchanging && setup_.algorithm != "doubling") ways.push_back(Way::exchange);
  return ways;
}

Way Chooser::for_allgather(size_t bytes) const {
  constexpr size_t kOneMessageBytes = 64 << 10;
  if (bytes < kOneMessageBytes && has_short_moves()) return Way::halving;
  if (const std::optional<size_t> long_from = long_from_bytes()) return bytes >= *long_from ? Way::ring : Way::halving;
  return fastest({Way::ring, Way::halving}, {ranks_, bytes});
}

Way Chooser::long_way(bool is_16_bit) const {
  if (setup_.algorithm == "doubling") return Way::halving;
  if (!is_16_bit) return Way::ring;
  return ranks_ <= kMostExchanging ? Way::exchange : Way::halving;
}

std::optional<size_t> Chooser::long_from_bytes() const {
  constexpr size_t kUnevenFromBytes = 192 << 10;
  if (setup_.algorithm == "ring") return 0;
  if (tuning_->ring_from_bytes > 0) return tuning_->ring_from_bytes;
  return setup_.is_even ? std::nullopt : std::optional(kUnevenFromBytes);
}

Way Chooser::way(size_t bytes, bool is_16_bit) const {
  if (setup_.algorithm == "mpi") return Way::library;
  const ReducedArray array = {ranks_, bytes, is_16_bit};
  const std::optional<size_t> long_from = long_from_bytes();
  if (long_from && bytes >= *long_from) return long_way(is_16_bit);
  Way way = fastest({Way::doubling, Way::halving}, array);
  if (!long_from) way = fastest({long_way(is_16_bit), way}, array);
  return way == Way::doubling && is_library_short_ ? Way::library : way;
}

// Of two that take as long, the first one.
Way Chooser::fastest(const std::vector<Way>& ways, const ReducedArray& array) const {
  return *std::min_element(ways.begin(), ways.end(), [&](Way one, Way other) {
    return allreduce_s(one, array, setup_.link) < allreduce_s(other, array, setup_.link);
  });
}

size_t Chooser::steps(Way way) const {
  return 2 * (way == Way::halving ? static_cast<size_t>(steps_of_halving(ranks_)) : ranks_ - 1);
}

std::vector<Chooser::Choice> Chooser::choices(const std::function<Way(size_t)>& way_of) {
  constexpr size_t kLongest = size_t{1} << 40, kFinest = 1 << 10;
  std::vector<Choice> all = {{0, way_of(0)}};
  for (size_t bytes = kFinest; bytes <= kLongest; bytes *= 2) {
    const Way next = way_of(bytes);
    if (next == all.back().way) continue;
    size_t low = bytes / 2, high = bytes;
    while (high - low > kFinest) {
      const size_t middle = low + (high - low) / 2 / kFinest * kFinest;
      (way_of(middle) == all.back().way ? low : high) = middle;
    }
    all.push_back({high, next});
  }
  return all;
}

void Chooser::prefer_library(bool for_all) {
  if (for_all) setup_.algorithm = "mpi";
  is_library_short_ = true;
}

}  // namespace ringtrain
