#include "xla/tickets.h"

#include <algorithm>
#include <utility>

namespace ringtrain::xla {

uint32_t Tickets::add(Started started) {
  const Lock lock(mutex_);
  started_.emplace(++last_, std::move(started));
  return last_;
}

Started Tickets::at(uint32_t ticket) const {
  const Lock lock(mutex_);
  const auto found = started_.find(ticket);
  if (found == started_.end()) throw failure("XLA has finished an operation twice, or one that was never started");
  return found->second;
}

void Tickets::forget(uint32_t ticket) {
  const Lock lock(mutex_);
  started_.erase(ticket);
}

bool Tickets::are_done() const {
  const Lock lock(mutex_);
  return std::all_of(started_.begin(), started_.end(), [](const auto& entry) { return entry.second.is_done(); });
}

bool Tickets::are_free() const {
  const Lock lock(mutex_);
  return std::all_of(started_.begin(), started_.end(), [](const auto& entry) { return entry.second.is_memory_free(); });
}

// Never destroyed: threads of XLA may be at work when the process ends.
Tickets& tickets() {
  static Tickets& all = *new Tickets;
  return all;
}

}  // namespace ringtrain::xla
