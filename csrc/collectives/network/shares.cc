#include "collectives/network/shares.h"

#include <algorithm>
#include <numeric>

namespace ringtrain {
namespace {

using Parts = std::vector<uint64_t>;

constexpr uint64_t kWhole = 1 << 20;  // parts of an array

uint64_t sum_of(const Parts& parts) { return std::accumulate(parts.begin(), parts.end(), uint64_t{0}); }
uint64_t beyond(uint64_t value, uint64_t less) { return value > less ? value - less : 0; }

// The smallest number in [low, high] from which on `is_enough` holds; it holds at `high`.
template <typename IsEnough>
uint64_t least(uint64_t low, uint64_t high, IsEnough is_enough) {
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (is_enough(middle))
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Returns how much each can carry while the slowest one carries `load`.
Parts carried(const LinkRates& rates, uint64_t load) {
  const uint64_t slowest = *std::min_element(rates.begin(), rates.end());
  Parts all;
  for (const uint64_t rate : rates) all.push_back(rate * load / slowest);
  return all;
}

// Parts of which rank i and the next one have needed[i] together, where rank 0 has `first`. A part that is larger than
// the link before it needs saves nothing at the link behind it beyond itself, so each is as small as it can be.
Parts cover(const Parts& needed, uint64_t first) {
  Parts parts = {first};
  for (size_t i = 1; i < needed.size(); ++i) parts.push_back(beyond(needed[i - 1], parts.back()));
  parts.back() = std::max(parts.back(), beyond(needed.back(), first));
  return parts;
}

// Those with the smallest sum, which is convex in the part of rank 0.
Parts cover(const Parts& needed) {
  const auto sum = [&](uint64_t first) { return sum_of(cover(needed, first)); };
  return cover(needed, least(0, 2 * kWhole, [&](uint64_t first) { return sum(first + 1) >= sum(first); }));
}

// The parts of a ring in which the slowest link carries `load`.
Parts ring_parts(const LinkRates& links, uint64_t load) {
  Parts needed = carried(links, load);
  for (uint64_t& link : needed) link = beyond(2 * kWhole, link);
  return cover(needed);
}

// The largest parts of an exchange in which the slowest of n > 2 hosts carries `load`.
Parts exchange_parts(const LinkRates& hosts, uint64_t load) {
  Parts parts = carried(hosts, load);
  for (uint64_t& part : parts) part = std::min(kWhole, beyond(part, kWhole) / (hosts.size() - 2));
  return parts;
}

bool is_worth_it(uint64_t load, size_t ranks) {
  const uint64_t equal = 2 * kWhole * (ranks - 1) / ranks;
  return load * 100 < equal * 95;
}

}  // namespace

Shares::Shares(const std::vector<uint64_t>& parts) : parts_(parts.size()) {
  std::partial_sum(parts.begin(), parts.end(), parts_.begin());
}

Shares Shares::of_ring(const LinkRates& rates) {
  const size_t ranks = rates.size();
  LinkRates links;
  for (size_t i = 0; i < ranks; ++i) links.push_back(std::min(rates[i], rates[(i + 1) % ranks]));
  const uint64_t load = least(0, 2 * kWhole, [&](uint64_t some) { return sum_of(ring_parts(links, some)) <= kWhole; });
  if (!is_worth_it(load, ranks)) return equal(ranks);
  Parts parts = ring_parts(links, load);
  const uint64_t left = kWhole - sum_of(parts);
  for (uint64_t& part : parts) part += left / ranks;
  parts.front() += left % ranks;
  return Shares(parts);
}

Shares Shares::of_exchange(const LinkRates& rates) {
  const size_t ranks = rates.size();
  if (ranks <= 2) return equal(ranks);
  const uint64_t load =
      least(kWhole, 2 * kWhole, [&](uint64_t some) { return sum_of(exchange_parts(rates, some)) >= kWhole; });
  if (!is_worth_it(load, ranks)) return equal(ranks);
  // Fast hosts may have room for more than there is: each gives back in proportion.
  Parts parts = exchange_parts(rates, load);
  const uint64_t most = sum_of(parts);
  for (uint64_t& part : parts) part = part * kWhole / most;
  *std::max_element(parts.begin(), parts.end()) += kWhole - sum_of(parts);
  return Shares(parts);
}

Counts Shares::slices(size_t count) const {
  constexpr size_t kLine = 64, kFew = size_t{1} << 40;
  if (are_equal()) return even_slices(count, static_cast<int>(parts_.size()));
  Counts counts;
  size_t begin = 0;
  for (const uint64_t part : parts_) {
    // Of so many elements that the product would be too large, whole parts are long enough.
    const size_t exact = count < kFew ? count * part / kWhole : count / kWhole * part;
    const size_t end = part == kWhole ? count : std::min(count, (exact + kLine - 1) / kLine * kLine);
    counts.push_back(end - begin);
    begin = end;
  }
  return counts;
}

std::string Shares::text() const {
  std::string text;
  uint64_t before = 0;
  for (const uint64_t part : parts_) {
    text += (text.empty() ? "" : ", ") + std::to_string(((part - before) * 100 + kWhole / 2) / kWhole);
    before = part;
  }
  return text + " %";
}

}  // namespace ringtrain
