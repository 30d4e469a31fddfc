// The cached operations for which this rank waits: a bit and the request each, by slot of the PlanCache.
#pragma once

#include <optional>
#include <vector>

#include "coordination/operation.h"
#include "coordination/words.h"

namespace ringtrain {

// What this rank has become ready for, and when that was first seen here.
struct Pending {
  RequestPtr request;
  double since = 0;
  const void* value = nullptr;  // the memory of a small tensor that may travel beside its bit
};

class Ready {
 public:
  void add(int slot, Pending pending);
  bool has(int slot) const { return static_cast<size_t>(slot) < pending_.size() && pending_[slot].request; }
  Pending take(int slot);
  void drop(int slot) {
    if (has(slot)) take(slot);
  }

  // `words` has as many bits as the cache has slots.
  void add_bits_to(Words& words) const;

  // The slot of the only one there is; nothing if there are others, or none.
  std::optional<int> only_one() const;
  const Pending& at(int slot) const { return pending_[static_cast<size_t>(slot)]; }

  // When the oldest came, or infinity.
  double oldest() const;

 private:
  std::vector<Pending> pending_;
  Words bits_;
};

}  // namespace ringtrain
