// What each rank gives to allgathers of many arrays, laid end to end on paper: a stream of bytes for each rank.
#pragma once

#include <algorithm>
#include <vector>

#include "collectives/group.h"

namespace ringtrain {

class GatherLayout {
 public:
  GatherLayout(const std::vector<Group::Gathering>& arrays, int size)
      : arrays_(arrays), totals_(static_cast<size_t>(size)) {
    offsets_.reserve(arrays.size());
    for (const Group::Gathering& array : arrays) {
      offsets_.push_back(offsets_of(array.bytes));
      for (size_t rank = 0; rank < totals_.size(); ++rank) totals_[rank] += array.bytes[rank];
    }
  }

  // Bytes of the rank that gives most.
  size_t longest() const { return *std::max_element(totals_.begin(), totals_.end()); }

  // How far one rank's stream has come.
  struct Cursor {
    size_t array = 0;
    size_t within = 0;  // bytes of the rank's part of this array
    size_t done = 0;    // bytes
  };
  bool is_at_end(const Cursor& cursor, int rank) const { return cursor.done == totals_[static_cast<size_t>(rank)]; }

  // Calls visit(source, destination, offset within these bytes, bytes) for each part of an array in the next `most`
  // bytes of a rank's stream. The source is that of this rank alone.
  template <typename Visit>
  void for_next(Cursor& cursor, int rank, size_t most, Visit visit) const {
    const auto of = static_cast<size_t>(rank);
    for (size_t offset = 0; offset < most && !is_at_end(cursor, rank);) {
      const Group::Gathering& array = arrays_[cursor.array];
      const size_t bytes = std::min(most - offset, array.bytes[of] - cursor.within);
      if (bytes > 0)
        visit(static_cast<const char*>(array.source) + cursor.within,
              static_cast<char*>(array.destination) + offsets_[cursor.array][of] + cursor.within, offset, bytes);
      offset += bytes;
      cursor.done += bytes;
      cursor.within += bytes;
      if (cursor.within < array.bytes[of]) continue;
      ++cursor.array;
      cursor.within = 0;
    }
  }

 private:
  const std::vector<Group::Gathering>& arrays_;
  std::vector<Counts> offsets_;  // of the ranks' parts in each destination
  Counts totals_;                // bytes, by rank
};

}  // namespace ringtrain
