#include "coordination/rank_set.h"

#include <algorithm>
#include <iterator>

namespace ringtrain {

void RankSet::add(Range range) {
  if (!ranges_.empty() && range.first == ranges_.back().last + 1) {
    ranges_.back().last = range.last;
    size_ += static_cast<size_t>(range.last - range.first + 1);
    return;
  }
  const auto ends_before = [](const Range& one, int rank) { return one.last < rank; };
  const auto touched = std::lower_bound(ranges_.begin(), ranges_.end(), range.first - 1, ends_before);
  auto end = touched;
  for (; end != ranges_.end() && end->first <= range.last + 1; ++end) {
    range = {std::min(range.first, end->first), std::max(range.last, end->last)};
    size_ -= static_cast<size_t>(end->last - end->first + 1);
  }
  size_ += static_cast<size_t>(range.last - range.first + 1);
  if (touched == end) {
    ranges_.insert(end, range);
  } else {
    *touched = range;
    ranges_.erase(std::next(touched), end);
  }
}

void RankSet::add(const RankSet& others) {
  for (const Range& range : others.ranges_) add(range);
}

bool RankSet::contains(int rank) const {
  const auto ends_before = [](const Range& one, int other) { return one.last < other; };
  const auto it = std::lower_bound(ranges_.begin(), ranges_.end(), rank, ends_before);
  return it != ranges_.end() && it->first <= rank;
}

std::string ranks_text(const RankSet& ranks) {
  constexpr size_t kMostRanges = 16;
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  size_t ranges = 0, told = 0;
  for (const auto& [first, last] : ranks.ranges()) {
    if (ranges++ == kMostRanges) break;
    text += (ranges > 1 ? ", " : " ") + std::to_string(first);
    if (last > first) text += "-" + std::to_string(last);
    told += static_cast<size_t>(last - first + 1);
  }
  return told < ranks.size() ? text + " and " + std::to_string(ranks.size() - told) + " more" : text;
}

}  // namespace ringtrain
