// What was agreed before: a rank that wants it again sets one bit instead of announcing it in full.
//
// Every rank's cache holds the same entries in the same slots, since all insert, use and evict by the same plans in the
// same order. Only `own` differs: what this rank itself had announced for the entry.
//
// It remembers the plans of whole rounds, too: when the same operations become common again, as in every step of a
// training, nothing is sorted, fused or allocated.
#pragma once

#include <list>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "coordination/plan.h"
#include "coordination/words.h"

namespace ringtrain {

class PlanCache {
 public:
  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  static bool is_cacheable(const Agreement& agreement);

  // The slot of an entry for which this rank had announced exactly this.
  std::optional<int> find(const Request& request) const;
  std::optional<int> find(const KeyView& key) const;
  const AgreementPtr& at(int slot) const { return slots_[slot]->agreement; }
  bool has(int slot) const { return slots_[slot].has_value(); }
  int slot_count() const { return static_cast<int>(slots_.size()); }

  // The entry that insert() would throw out to make place for `key`: an older one of this key, or the one that was not
  // used for longest.
  std::optional<int> slot_to_lose(const KeyView& key) const;
  // `own`: nothing if this rank had not announced it.
  void insert(AgreementPtr agreement, std::optional<Request> own);
  void use(int slot);
  void evict(int slot);

  // The plans of a round in which exactly the operations with these bits became common, or null.
  const std::vector<PlanPtr>* plans_for(const Words& bits) const;
  void remember_plans(const Words& bits, std::vector<PlanPtr> plans);
  void forget_plans() { plans_.clear(); }

 private:
  struct Entry {
    AgreementPtr agreement;
    std::optional<Request> own;
    std::list<int>::iterator age;
  };

  const size_t capacity_;
  std::vector<std::optional<Entry>> slots_;
  std::unordered_map<KeyView, int, HashOfKey> slot_of_;  // the names live in the agreements
  std::list<int> by_age_;                                // slots in use, the one used last at the end
  std::vector<int> free_;
  std::map<Words, std::vector<PlanPtr>> plans_;  // by the bits of the round; only of entries that are still here
};

}  // namespace ringtrain
