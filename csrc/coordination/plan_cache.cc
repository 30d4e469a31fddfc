#include "coordination/plan_cache.h"

namespace ringtrain {

bool PlanCache::is_cacheable(const Agreement& agreement) {
  return agreement.error == ErrorKind::none && agreement.request.kind <= OpKind::barrier;
}

std::optional<int> PlanCache::find(const Key& key) const {
  const auto it = slot_of_.find(key);
  return it == slot_of_.end() ? std::nullopt : std::optional<int>(it->second);
}

std::optional<int> PlanCache::find(const Request& request) const {
  const std::optional<int> slot = find(key_of(request));
  return slot && slots_[*slot]->own == request ? slot : std::nullopt;
}

std::optional<int> PlanCache::slot_to_lose(const Key& key) const {
  if (const std::optional<int> old = find(key)) return old;
  if (slot_of_.size() < capacity_ || by_age_.empty()) return std::nullopt;
  return by_age_.front();
}

void PlanCache::insert(const Agreement& agreement, std::optional<Request> own) {
  if (capacity_ == 0) return;
  const Key key = key_of(agreement.request);
  if (const std::optional<int> loser = slot_to_lose(key)) evict(*loser);
  if (free_.empty()) {
    free_.push_back(slot_count());
    slots_.emplace_back();
  }
  const int slot = free_.back();
  free_.pop_back();
  slots_[slot] = Entry{agreement, std::move(own), by_age_.insert(by_age_.end(), slot)};
  slot_of_[key] = slot;
}

void PlanCache::use(int slot) { by_age_.splice(by_age_.end(), by_age_, slots_[slot]->age); }

void PlanCache::evict(int slot) {
  slot_of_.erase(key_of(at(slot).request));
  by_age_.erase(slots_[slot]->age);
  slots_[slot].reset();
  free_.push_back(slot);
}

}  // namespace ringtrain
