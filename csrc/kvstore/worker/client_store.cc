#include "kvstore/worker/client_store.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace ringtrain {

PartSpec ClientStore::spec_of(int server, const std::vector<StoreKey>& keys, int capacity) const {
  PartSpec spec{is_synchronous_, max_staleness_, capacity, {}, is_atomic_};
  for (const StoreKey& key : keys)
    for (const StoreKey::Piece& piece : key.pieces)
      if (piece.server == server) spec.pieces.push_back({key.id, key.dtype, piece.begin, piece.count});
  return spec;
}

void ClientStore::add_part(std::shared_ptr<ClientPart> part, const std::vector<uint64_t>& pushes) {
  const Layout& layout = *part->layout;
  for (size_t i = 0; i < layout.spec().pieces.size(); ++i) {
    const KeyPiece& piece = layout.spec().pieces[i];
    uint64_t fewest = std::numeric_limits<uint64_t>::max();
    for (size_t chunk = layout.first_chunk(i); chunk < layout.first_chunk(i + 1); ++chunk)
      fewest = std::min(fewest, chunk < pushes.size() ? pushes[chunk] : 0);
    pieces_[{part->server, piece.key}] = {{part, i, piece.begin, piece.count}, fewest};
  }
  parts_.push_back(std::move(part));
}

uint32_t ClientStore::parts_of(int server) const {
  const auto is_there = [&](const std::shared_ptr<ClientPart>& part) { return part->server == server; };
  return static_cast<uint32_t>(std::count_if(parts_.begin(), parts_.end(), is_there));
}

// A worker that comes back goes on where the chunk is that has the fewest of its pushes; others drop what they have.
void ClientStore::add_key(const StoreKey& key) {
  ClientKey own = {std::make_shared<const std::string>(key.name), key.dtype, key.count, {}};
  uint64_t fewest = std::numeric_limits<uint64_t>::max();
  for (const StoreKey::Piece& piece : key.pieces) {
    const auto found = pieces_.find({piece.server, key.id});
    if (found == pieces_.end())
      throw failure("server " + std::to_string(piece.server) + " does not know key \"" + key.name + "\"");
    const auto& [there, pushes] = found->second;
    if (there.begin != piece.begin || there.count != piece.count)
      throw failure("server " + std::to_string(piece.server) + " has another piece of key \"" + key.name + "\"");
    own.pieces.push_back(there);
    fewest = std::min(fewest, pushes);
  }
  if (fewest != std::numeric_limits<uint64_t>::max()) own.pushes = fewest;
  keys_.emplace(key.id, std::move(own));
}

ClientKey& ClientStore::key(uint32_t id) {
  const auto found = keys_.find(id);
  if (found == keys_.end())
    throw invalid("store " + std::to_string(number_) + " has no key number " + std::to_string(id) + " here");
  return found->second;
}

size_t ClientStore::array_of(const std::string& name) const {
  if (name == "master") return 1;
  const auto found = std::find(state_names_.begin(), state_names_.end(), name);
  if (found == state_names_.end()) throw invalid("the optimizer of this store remembers no \"" + name + "\"");
  return 2 + static_cast<size_t>(found - state_names_.begin());
}

}  // namespace ringtrain
