#include "kvstore/server/waiting_room.h"

#include <algorithm>

namespace ringtrain {

// The Part says that somebody waits before the last look: who changes something looks after it has changed it.
void WaitingRoom::enter(const Name& name, Part& part, size_t chunk, Attempt attempt) {
  part.header().has_parked.fetch_add(1, std::memory_order_seq_cst);
  names_.insert(name);
  tables_[{&part, chunk}].push_back({name, std::move(attempt)});
  try_chunk(part, chunk);
}

void WaitingRoom::note_left(Part& part, const Name& name) {
  part.header().has_parked.fetch_sub(1, std::memory_order_seq_cst);
  names_.erase(name);
}

void WaitingRoom::leave(uint64_t session) {
  for (auto table = tables_.begin(); table != tables_.end();) {
    auto& guests = table->second;
    const auto gone = std::stable_partition(guests.begin(), guests.end(),
                                            [&](const Guest& guest) { return guest.name.session != session; });
    std::for_each(gone, guests.end(), [&](const Guest& guest) { note_left(*table->first.first, guest.name); });
    guests.erase(gone, guests.end());
    table = guests.empty() ? tables_.erase(table) : std::next(table);
  }
}

void WaitingRoom::try_table(Tables::value_type& table) {
  auto& guests = table.second;
  const auto done =
      std::stable_partition(guests.begin(), guests.end(), [](const Guest& one) { return !one.attempt(); });
  std::for_each(done, guests.end(), [&](const Guest& guest) { note_left(*table.first.first, guest.name); });
  guests.erase(done, guests.end());
}

void WaitingRoom::try_chunk(Part& part, size_t chunk) {
  const auto table = tables_.find({&part, chunk});
  if (table == tables_.end()) return;
  try_table(*table);
  if (table->second.empty()) tables_.erase(table);
}

void WaitingRoom::try_all() {
  for (auto table = tables_.begin(); table != tables_.end();) {
    try_table(*table);
    table = table->second.empty() ? tables_.erase(table) : std::next(table);
  }
}

}  // namespace ringtrain
