// How often the others waited for this rank: the straggler's own count.
//
// A round tells which bits all ranks have set. Here it also tells which bits nobody has set, as the bits of a
// complement that all have set. So each rank knows what some others were ready for in the round before; if that becomes
// common as soon as this rank is ready, it was this rank that came last.
#pragma once

#include <atomic>
#include <cstdint>

#include "coordination/words.h"

namespace ringtrain {

class Lateness {
 public:
  // This rank's own bits.
  void keep(const Words& ready) { own_ = ready; }

  // Appends to this rank's row what the others are to know.
  void tell(Words& row) const {
    for (const uint64_t word : own_) row.push_back(~word);
  }

  // Takes from the row of all ranks what was appended, so that the common bits stay.
  void hear(Words& row) {
    const size_t size = own_.size();
    own_before_.resize(size);
    some_before_.resize(size);
    for (size_t i = 0; i < size; ++i) {
      const uint64_t common = row[i], some = ~row[size + i];
      came_last_ += static_cast<uint64_t>(__builtin_popcountll(common & own_[i] & ~own_before_[i] & some_before_[i]));
      own_before_[i] = own_[i] & ~common;
      some_before_[i] = some & ~common;
    }
    row.resize(size);
  }

  // The bits mean something else from now on.
  void forget() {
    own_before_.clear();
    some_before_.clear();
  }

  // Any thread. For how many operations, of those that are agreed on by a bit.
  uint64_t came_last() const { return came_last_; }

 private:
  Words own_, own_before_, some_before_;  // of this rank and of any; before: without what became common
  std::atomic<uint64_t> came_last_{0};
};

}  // namespace ringtrain
