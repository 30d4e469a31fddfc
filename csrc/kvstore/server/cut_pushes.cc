#include "kvstore/server/cut_pushes.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace ringtrain {

namespace {

// Called with the first push of a key by this process. Forgets those by the processes before: every server of the key
// let this one in, which it does not do before it has settled them and their connections have ended.
template <typename OfPushers>
void forget_before(const CutPushes::Pusher& pusher, OfPushers& of_pushers) {
  const auto own = of_pushers.lower_bound({pusher.worker, pusher.term, 0, 0});
  for (auto of = of_pushers.lower_bound({pusher.worker, 0, 0, 0}); of != own;)
    of = of->first.store == pusher.store && of->first.key == pusher.key ? of_pushers.erase(of) : std::next(of);
}

}  // namespace

void CutPushes::begin(const Pusher& pusher, uint32_t primary, uint64_t push) {
  const Lock lock(mutex_);
  if (is_primary(primary)) {
    const auto first = first_terms_.find(pusher.worker);
    if (first != first_terms_.end() && pusher.term < first->second)
      throw expelled(static_cast<uint32_t>(pusher.worker));
    add_begun(pusher, push);
  } else if (const auto orphans = orphans_.find(pusher); orphans != orphans_.end()) {
    orphans->second.erase(push);
    if (orphans->second.empty()) orphans_.erase(orphans);
  }
}

void CutPushes::refuse(const Pusher& pusher, uint32_t primary, uint64_t push) {
  const Lock lock(mutex_);
  if (is_primary(primary)) {
    begun_[pusher].refused.insert(push);
  } else if (const auto orphans = orphans_.find(pusher); orphans != orphans_.end()) {
    orphans->second.erase(push);
    if (orphans->second.empty()) orphans_.erase(orphans);
  }
}

void CutPushes::keep(const Pusher& pusher, uint32_t primary, uint64_t push, std::vector<LateChunk> chunks) {
  const Lock lock(mutex_);
  const auto settled = settled_.find(pusher);
  if (settled != settled_.end() && settled->second.count(push)) return;
  Orphan& orphan = orphans_[pusher][push];
  orphan.primary = primary;
  orphan.chunks = std::move(chunks);
  settle_orphans(pusher.worker);
}

void CutPushes::note_begun(const Pusher& pusher, uint64_t push) {
  const Lock lock(mutex_);
  add_begun(pusher, push);
}

void CutPushes::add_begun(const Pusher& pusher, uint64_t push) {
  Begun& begun = begun_[pusher];
  if (begun.is_empty()) forget_before(pusher, begun_);
  begun.first = std::min(begun.first, push);
  begun.last = std::max(begun.last, push);
}

CutPushes::Fate CutPushes::fate_of(const Pusher& pusher, uint32_t primary, uint64_t push) const {
  const Lock lock(mutex_);
  return fate(pusher, primary, push, true, true);
}

void CutPushes::give_up(const Pusher& pusher, uint64_t push) {
  const Lock lock(mutex_);
  const auto orphans = orphans_.find(pusher);
  if (orphans == orphans_.end()) return;
  const auto orphan = orphans->second.find(push);
  if (orphan == orphans->second.end()) return;
  orphan->second.is_given_up = true;
  settle_orphans(pusher.worker);
}

CutPushes::Fate CutPushes::fate(const Pusher& pusher, uint32_t primary, uint64_t push, bool is_dead,
                                bool is_over) const {
  const auto told = told_.find({pusher.worker, primary});
  if (is_dead && told != told_.end() && pusher.term < told->second.first_term) {
    const auto begun = told->second.begun.find(pusher);
    return begun != told->second.begun.end() && begun->second.has(push) ? Fate::applies : Fate::drops;
  }
  return is_over && lost_servers_.count(primary) ? Fate::drops : Fate::open;
}

// Pushes to a key are settled in order.
void CutPushes::settle_orphans(int worker) {
  const auto first_term = first_terms_.find(worker);
  for (auto of = orphans_.lower_bound({worker, 0, 0, 0}); of != orphans_.end() && of->first.worker == worker;) {
    auto& pushes = of->second;
    while (!pushes.empty()) {
      const auto first = pushes.begin();
      const Orphan& orphan = first->second;
      const bool is_dead = first_term != first_terms_.end() && of->first.term < first_term->second;
      const Fate its = fate(of->first, orphan.primary, first->first, is_dead, is_dead || orphan.is_given_up);
      if (its == Fate::open) break;
      if (its == Fate::applies)
        std::move(first->second.chunks.begin(), first->second.chunks.end(), std::back_inserter(applied_));
      std::set<uint64_t>& settled = settled_[of->first];
      if (settled.empty()) forget_before(of->first, settled_);
      settled.insert(first->first);
      pushes.erase(first);
    }
    of = pushes.empty() ? orphans_.erase(of) : std::next(of);
  }
}

void CutPushes::settle_all() {
  std::set<int> workers;
  for (const auto& [pusher, pushes] : orphans_) workers.insert(pusher.worker);
  for (const int worker : workers) settle_orphans(worker);
}

// Keeps the pushes that dead processes have begun, not only those of the last one: this server or another one may go on
// later with memory that has a push of any of them. See forget_before().
Bytes CutPushes::lose_worker(int worker, uint32_t first_term) {
  const Lock lock(mutex_);
  uint32_t& known = first_terms_[worker];
  known = std::max(known, first_term);
  for (auto of = begun_.lower_bound({worker, 0, 0, 0}); of != begun_.lower_bound({worker, first_term, 0, 0});)
    of = of->second.is_empty() ? begun_.erase(of) : std::next(of);
  settle_orphans(worker);
  return begun_before(worker, first_term);
}

std::vector<std::pair<int, Bytes>> CutPushes::begun_of_dead() const {
  const Lock lock(mutex_);
  std::vector<std::pair<int, Bytes>> all;
  for (const auto& [worker, first_term] : first_terms_) all.emplace_back(worker, begun_before(worker, first_term));
  return all;
}

Bytes CutPushes::begun_before(int worker, uint32_t first_term) const {
  Writer writer;
  writer.put(first_term);
  BegunPushes dead;
  for (const auto& [pusher, begun] : begun_)
    if (pusher.worker == worker && pusher.term < first_term) dead[pusher] = begun;
  writer.put(static_cast<uint64_t>(dead.size()));
  for (const auto& [pusher, begun] : dead) {
    writer.put(pusher.term);
    writer.put(pusher.store);
    writer.put(pusher.key);
    writer.put(begun.first);
    writer.put(begun.last);
    writer.put(static_cast<uint64_t>(begun.refused.size()));
    for (const uint64_t push : begun.refused) writer.put(push);
  }
  return writer.take();
}

void CutPushes::settle(int worker, int server, const Bytes& begun) {
  Reader reader(begun);
  Told told;
  told.first_term = reader.get<uint32_t>();
  for (auto left = reader.get<uint64_t>(); left > 0; --left) {
    Pusher pusher{worker, 0, 0, 0};
    pusher.term = reader.get<uint32_t>();
    pusher.store = reader.get<uint32_t>();
    pusher.key = reader.get<uint32_t>();
    Begun& its = told.begun[pusher];
    its.first = reader.get<uint64_t>();
    its.last = reader.get<uint64_t>();
    for (auto refused = reader.get<uint64_t>(); refused > 0; --refused) its.refused.insert(reader.get<uint64_t>());
  }
  const Lock lock(mutex_);
  Told& known = told_[{worker, static_cast<uint32_t>(server)}];
  if (told.first_term > known.first_term) known = std::move(told);
  settle_orphans(worker);
}

void CutPushes::lose_server(int server) {
  const Lock lock(mutex_);
  lost_servers_.insert(static_cast<uint32_t>(server));
  settle_all();
}

void CutPushes::return_server(int server) {
  const Lock lock(mutex_);
  lost_servers_.erase(static_cast<uint32_t>(server));
}

bool CutPushes::has_orphans(int worker, uint32_t first_term) const {
  const Lock lock(mutex_);
  const auto of = orphans_.lower_bound({worker, 0, 0, 0});
  return of != orphans_.end() && of->first.worker == worker && of->first.term < first_term;
}

std::vector<LateChunk> CutPushes::take() {
  const Lock lock(mutex_);
  return std::exchange(applied_, {});
}

bool CutPushes::has_settled() const {
  const Lock lock(mutex_);
  return !applied_.empty();
}

}  // namespace ringtrain
