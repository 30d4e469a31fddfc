#include "kvstore/store/slot_pool.h"

#include <algorithm>

namespace ringtrain {

SlotPool::SlotPool(Part& part, size_t worker, const std::vector<Open>& open)
    : part_(part), worker_(worker), open_(open.begin(), open.end()) {
  part.memory().reserve(part.layout().slot_control_at(worker, 1), part.layout().slot_control_bytes());
  std::vector<bool> is_used(part.layout().slots() + 1);
  for (const Open& one : open) is_used[one.slot] = true;
  for (uint32_t slot = part.layout().slots(); slot > 0; --slot)
    if (!is_used[slot]) free_.push_back(slot);
}

uint32_t SlotPool::take() {
  constexpr uint32_t kAtOnce = 16;
  look();
  if (free_.empty()) return kNoSlot;
  const uint32_t slot = free_.back();
  if (slot > reserved_) {
    const uint32_t last = std::min(slot + kAtOnce - 1, part_.layout().slots());
    const size_t begin = part_.layout().slot_at(worker_, reserved_ + 1);
    part_.memory().reserve(begin, part_.layout().slot_at(worker_, last) + Layout::kChunkBytes - begin);
    reserved_ = last;
  }
  free_.pop_back();
  return slot;
}

// The first ones close first, more or less.
void SlotPool::look() {
  constexpr size_t kAhead = 64;
  for (size_t i = 0; i < std::min(open_.size(), kAhead);) {
    const Open& one = open_[i];
    if (part_.record(one.chunk).closed.load(std::memory_order_acquire) < one.round) {
      ++i;
      continue;
    }
    free_.push_back(one.slot);
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace ringtrain
