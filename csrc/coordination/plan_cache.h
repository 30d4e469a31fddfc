// Operations that were agreed on before: a rank repeats one by setting a bit instead of announcing it in full.
//
// Every rank's cache holds the same entries in the same slots, since all insert, use and evict by the same rounds of
// the world. An entry that a round on a node has used counts as used in the next round of the world. Only `own`
// differs: what this rank itself had announced for the entry.
//
// How many it holds follows from what comes again. A full cache throws out what was not used for longest, but remembers
// its name: if that comes again the cache was too small, and grows instead. So the steps of a large model soon find all
// their operations here, while names that come once only, such as "loss of step 123", replace each other. There is an
// end to growing. From then on what comes again is left out, since throwing out the oldest would make every operation
// of such a step miss; what is new gets a place even then, so a cache full of names of the past does not stay so.
//
// It remembers the plans of whole rounds, too: when the same operations become common again, as in every step of a
// training, nothing is sorted, fused or allocated.
#pragma once

#include <list>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coordination/channel.h"
#include "coordination/plan.h"

namespace ringtrain {

// The names of operations that the cache has thrown out, the last ones of a given number.
class EvictedNames {
 public:
  explicit EvictedNames(size_t most) : most_(most) {}

  bool has(const KeyView& key) const { return place_of_.count(key) != 0; }

  // One that is not here yet.
  void add(Key key) {
    if (by_age_.size() == most_) remove(view_of(by_age_.front()));
    by_age_.push_back(std::move(key));
    place_of_[view_of(by_age_.back())] = std::prev(by_age_.end());
  }

  void remove(const KeyView& key) {
    const auto found = place_of_.find(key);
    if (found == place_of_.end()) return;
    const auto place = found->second;
    place_of_.erase(found);
    by_age_.erase(place);
  }

 private:
  const size_t most_;
  std::list<Key> by_age_;  // the oldest first
  std::unordered_map<KeyView, std::list<Key>::iterator, HashOfKey> place_of_;
};

class PlanCache {
 public:
  // `capacity`: how many entries it holds before it grows; 0: it stays empty.
  explicit PlanCache(size_t capacity) : capacity_(capacity), largest_capacity_(kGrowth * capacity), evicted_(kNames) {}

  static bool is_cacheable(const Agreement& agreement);

  // The slot of an entry for which this rank had announced exactly this.
  std::optional<int> find(const Request& request) const;
  std::optional<int> find(const KeyView& key) const;
  const AgreementPtr& at(int slot) const { return slots_[slot]->agreement; }
  bool has(int slot) const { return slots_[slot].has_value(); }
  int slot_count() const { return static_cast<int>(slots_.size()); }

  // Replaces an older one of this key, or another entry if there is no room. `own`: null if this rank had not
  // announced it. The slot, whose last entry is gone; nothing if the new one is left out.
  std::optional<int> insert(AgreementPtr agreement, RequestPtr own);
  void use(int slot);
  void evict(int slot);

  // The plans of a round in which exactly the operations with these bits became common, or null.
  const std::vector<PlanPtr>* plans_for(const Words& bits) const;
  void remember_plans(const Words& bits, std::vector<PlanPtr> plans);
  void forget_plans() { plans_.clear(); }

 private:
  struct Entry {
    AgreementPtr agreement;
    RequestPtr own;
    std::list<int>::iterator age;
  };

  static constexpr size_t kGrowth = 16, kNames = 1 << 16;

  bool make_room(const KeyView& key);

  size_t capacity_;
  const size_t largest_capacity_;
  EvictedNames evicted_;  // to make room
  std::vector<std::optional<Entry>> slots_;
  std::unordered_map<KeyView, int, HashOfKey> slot_of_;  // the names live in the agreements
  std::list<int> by_age_;                                // slots in use, the one used last at the end
  std::vector<int> free_;
  std::map<Words, std::vector<PlanPtr>> plans_;  // by the bits of the round; only of entries that are still here
};

}  // namespace ringtrain
