// The names of operations that a cache has thrown out, the last ones of a given number.
#pragma once

#include <list>
#include <unordered_map>
#include <utility>

#include "coordination/operation.h"

namespace ringtrain {

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

}  // namespace ringtrain
