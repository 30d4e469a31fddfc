#include "coordination/plan_cache.h"

namespace ringtrain {

bool PlanCache::is_cacheable(const Agreement& agreement) {
  return agreement.error == ErrorKind::none && agreement.operation.kind <= OpKind::barrier;
}

std::optional<int> PlanCache::find(const KeyView& key) const {
  const auto it = slot_of_.find(key);
  return it == slot_of_.end() ? std::nullopt : std::optional<int>(it->second);
}

std::optional<int> PlanCache::find(const Request& request) const {
  const std::optional<int> slot = find(view_of(request.operation));
  if (!slot || request.is_unordered) return std::nullopt;  // a bit would not tell the others
  const Request* own = slots_[*slot]->own.get();
  return own && (own == &request || own->operation == request.operation) ? slot : std::nullopt;
}

// Whether there is room now.
bool PlanCache::make_room(const KeyView& key) {
  if (const std::optional<int> old = find(key)) {
    evict(*old);
    return true;
  }
  if (slot_of_.size() < capacity_) return true;
  if (evicted_.has(key)) {
    if (capacity_ == largest_capacity_) return false;
    ++capacity_;
    return true;
  }
  if (capacity_ == 0) return false;
  const int oldest = by_age_.front();
  evicted_.add(key_of(at(oldest)->operation));
  evict(oldest);
  return true;
}

std::optional<int> PlanCache::insert(AgreementPtr agreement, RequestPtr own) {
  const KeyView key = view_of(agreement->operation);
  if (!make_room(key)) return std::nullopt;
  evicted_.remove(key);
  if (free_.empty()) {
    free_.push_back(slot_count());
    slots_.emplace_back();
  }
  const int slot = free_.back();
  free_.pop_back();
  slots_[slot] = Entry{std::move(agreement), std::move(own), by_age_.insert(by_age_.end(), slot)};
  slot_of_[key] = slot;
  return slot;
}

void PlanCache::use(int slot) { by_age_.splice(by_age_.end(), by_age_, slots_[slot]->age); }

void PlanCache::evict(int slot) {
  slot_of_.erase(view_of(at(slot)->operation));
  by_age_.erase(slots_[slot]->age);
  slots_[slot].reset();
  free_.push_back(slot);
  plans_.clear();
}

const std::vector<PlanPtr>* PlanCache::plans_for(const Words& bits) const {
  const auto it = plans_.find(bits);
  return it == plans_.end() ? nullptr : &it->second;
}

// Gradients that become ready in changing company make many different rounds; only those that come again matter.
void PlanCache::remember_plans(const Words& bits, std::vector<PlanPtr> plans) {
  constexpr size_t kMost = 256;
  if (plans_.size() >= kMost) plans_.clear();
  plans_[bits] = std::move(plans);
}

}  // namespace ringtrain
