#include "kvstore/store/part_table.h"

#include <string>

#include "base/error.h"

namespace ringtrain {
namespace {

// The tables of the servers of this process.
struct Registry {
  Mutex mutex;
  std::map<uint64_t, std::weak_ptr<PartTable>> tables GUARDED_BY(mutex);
};

Registry& registry() {
  static Registry* const one = new Registry;
  return *one;
}

}  // namespace

void PartTable::announce(uint64_t identity, const std::shared_ptr<PartTable>& table) {
  const Lock lock(registry().mutex);
  registry().tables[identity] = table;
}

void PartTable::withdraw(uint64_t identity) {
  const Lock lock(registry().mutex);
  registry().tables.erase(identity);
}

std::shared_ptr<PartTable> PartTable::of_server(uint64_t identity) {
  const Lock lock(registry().mutex);
  const auto found = registry().tables.find(identity);
  return found == registry().tables.end() ? nullptr : found->second.lock();
}

void PartTable::add(uint32_t store, const std::shared_ptr<Part>& part) {
  const Lock lock(mutex_);
  const std::vector<KeyPiece>& pieces = part->spec().pieces;
  for (const KeyPiece& piece : pieces)
    if (places_.count({store, piece.key}))
      throw invalid("key number " + std::to_string(piece.key) + " of store " + std::to_string(store) +
                    " is there already");
  for (size_t i = 0; i < pieces.size(); ++i) places_[{store, pieces[i].key}] = {part, i};
  parts_[store].push_back(part);
}

PartTable::Place PartTable::find(uint32_t store, uint32_t key) const {
  const Lock lock(mutex_);
  const auto found = places_.find({store, key});
  return found == places_.end() ? Place() : found->second;
}

std::vector<std::shared_ptr<Part>> PartTable::parts(uint32_t store) const {
  const Lock lock(mutex_);
  const auto found = parts_.find(store);
  return found == parts_.end() ? std::vector<std::shared_ptr<Part>>() : found->second;
}

}  // namespace ringtrain
