// What was agreed before: a rank that wants it again sets one bit instead of announcing it in full.
//
// Every rank's cache holds the same entries in the same slots, since all insert, use and evict by the same plans in the
// same order. Only `own` differs: what this rank itself had announced for the entry.
#pragma once

#include <list>
#include <map>
#include <optional>
#include <vector>

#include "coordination/plan.h"

namespace ringtrain {

class PlanCache {
 public:
  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  static bool is_cacheable(const Agreement& agreement);

  // The slot of an entry for which this rank had announced exactly this.
  std::optional<int> find(const Request& request) const;
  std::optional<int> find(const Key& key) const;
  const Agreement& at(int slot) const { return slots_[slot]->agreement; }
  bool has(int slot) const { return slots_[slot].has_value(); }
  int slot_count() const { return static_cast<int>(slots_.size()); }

  // The entry that insert() would throw out to make place for `key`: an older one of this key, or the one that was not
  // used for longest.
  std::optional<int> slot_to_lose(const Key& key) const;
  // `own`: nothing if this rank had not announced it.
  void insert(const Agreement& agreement, std::optional<Request> own);
  void use(int slot);
  void evict(int slot);

 private:
  struct Entry {
    Agreement agreement;
    std::optional<Request> own;
    std::list<int>::iterator age;
  };

  const size_t capacity_;
  std::vector<std::optional<Entry>> slots_;
  std::map<Key, int> slot_of_;
  std::list<int> by_age_;  // slots in use, the one used last at the end
  std::vector<int> free_;
};

}  // namespace ringtrain
