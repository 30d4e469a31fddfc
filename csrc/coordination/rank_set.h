// Ranks as ranges, since in most cases it is all of them, or all but a few: "ranks 0-2, 5".
#pragma once

#include <cstddef>
#include <string>
#include <tuple>
#include <vector>

namespace ringtrain {

class RankSet {
 public:
  struct Range {
    int first, last;
  };

  RankSet() = default;
  explicit RankSet(Range range) { add(range); }

  // May be in the set already. Takes constant time behind all that are there.
  void add(Range range);
  void add(int rank) { add({rank, rank}); }
  void add(const RankSet& others);

  bool contains(int rank) const;
  size_t size() const { return size_; }
  bool empty() const { return ranges_.empty(); }
  // Of a set that is not empty.
  int first() const { return ranges_.front().first; }
  int last() const { return ranges_.back().last; }

  // Calls visit(rank) for each, ascending.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Range& range : ranges_)
      for (int rank = range.first; rank <= range.last; ++rank) visit(rank);
  }
  const std::vector<Range>& ranges() const { return ranges_; }

 private:
  std::vector<Range> ranges_;  // ascending; no two of them touch
  size_t size_ = 0;
};

inline bool operator<(const RankSet::Range& a, const RankSet::Range& b) {
  return std::tie(a.first, a.last) < std::tie(b.first, b.last);
}
inline bool operator<(const RankSet& a, const RankSet& b) { return a.ranges() < b.ranges(); }

// "rank 3", "ranks 0-2, 5"; of many ranges the first ones, and how many ranks there are besides.
std::string ranks_text(const RankSet& ranks);

}  // namespace ringtrain
