#include "kvstore/part_table.h"

#include <string>

#include "base/error.h"

namespace ringtrain {

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
