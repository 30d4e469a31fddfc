// Where a worker puts what it pushes while a round is open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "kvstore/store/part.h"

namespace ringtrain {

// The slots of one worker in one Part. They go back by themselves when their rounds are closed, and the last one used
// is the first one used again, while it is in the cache. One thread at a time.
class SlotPool {
 public:
  // `open`: slots that this worker has filled before, in a process that is gone.
  struct Open {
    size_t chunk;
    uint32_t slot;
    uint64_t round;
  };
  SlotPool(Part& part, size_t worker, const std::vector<Open>& open);

  // kNoSlot where all are in use. It stays free until it is told to be open.
  uint32_t take();
  void give_back(uint32_t slot) { free_.push_back(slot); }
  void note_open(const Open& open) { open_.push_back(open); }
  // How many rounds wait for others, as far as it has looked.
  size_t open() const { return open_.size(); }
  void look();

 private:
  Part& part_;
  const size_t worker_;
  std::vector<uint32_t> free_;
  std::deque<Open> open_;
  uint32_t reserved_ = 0;
};

}  // namespace ringtrain
