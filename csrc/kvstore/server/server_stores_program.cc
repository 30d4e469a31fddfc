// What a program of the server updates: it is given gradients piece by piece, and gives values back.
#include <utility>

#include "base/error.h"
#include "kvstore/server/server_stores.h"

namespace ringtrain {
namespace {

constexpr const char* kProgram = "program";

}  // namespace

// Of all pieces in turn, so that none keeps the others waiting.
std::optional<ServerStores::Taken> ServerStores::take() {
  const Lock lock(mutex_);
  size_t pieces = 0;
  for (size_t i = 0; i < order_.size(); ++i) pieces += actor_of(i).part().spec().pieces.size();
  for (; pieces > 0; --pieces) {
    while (next_part_ >= order_.size() || next_piece_ >= actor_of(next_part_).part().spec().pieces.size()) {
      next_part_ = next_part_ + 1 < order_.size() ? next_part_ + 1 : 0;
      next_piece_ = 0;
    }
    if (auto taken = take_piece(next_part_, next_piece_++)) return taken;
  }
  return std::nullopt;
}

std::optional<ServerStores::Taken> ServerStores::take_piece(size_t number, size_t piece) {
  const uint32_t store = order_[number].first;
  const std::optional<RuleWords>& rule = stores_[store].rule;
  if (!rule || rule->name != kProgram) return std::nullopt;
  Actor& actor = actor_of(number);
  Part& part = actor.part();
  const size_t first = part.layout().first_chunk(piece), last = part.layout().first_chunk(piece + 1);
  const KeyPiece& of_key = part.spec().pieces[piece];
  const size_t element = size_of(wide(of_key.dtype));
  Taken taken{store, static_cast<uint32_t>(number), static_cast<uint32_t>(piece), of_key, {}, {}};
  bool is_there = first < last;
  const auto take_chunk = [&](size_t chunk) {
    if (!is_there) return true;
    taken.gradient.resize(of_key.count * element);
    taken.weight.resize(of_key.count * element);
    const size_t at = part.chunk(chunk).begin * element;
    const Reading reading = actor.take(chunk, taken.gradient.data() + at, taken.weight.data() + at);
    is_there = reading != Reading::not_yet;
    return reading != Reading::busy;
  };
  visit_all(part, first, last, timeout_s_, take_chunk);
  if (!is_there) return std::nullopt;
  return taken;
}

void ServerStores::finish(size_t number, size_t piece, const Bytes& weight,
                          const std::function<void(Part&, size_t)>& changed) {
  const Lock lock(mutex_);
  Actor& actor = actor_of(number);
  Part& part = actor.part();
  if (piece >= part.spec().pieces.size()) throw invalid("this part has no piece " + std::to_string(piece));
  const KeyPiece& of_key = part.spec().pieces[piece];
  const size_t element = size_of(wide(of_key.dtype));
  if (weight.size() != of_key.count * element) throw invalid("these are not the bytes of the value that was taken");
  const size_t first = part.layout().first_chunk(piece), last = part.layout().first_chunk(piece + 1);
  visit_all(part, first, last, timeout_s_, [&](size_t chunk) {
    if (!actor.finish(chunk, weight.data() + part.chunk(chunk).begin * element)) return false;
    changed(part, chunk);
    return true;
  });
}

}  // namespace ringtrain
