// Chunks whose values a program of the server updates: workers leave gradients, and the server takes them.
#include <cstring>

#include "base/error.h"
#include "kvstore/store/actor.h"
#include "kvstore/store/convert.h"

namespace ringtrain {

bool Actor::is_of_program(size_t chunk) {
  const UpdateRule* const rule = rule_of(chunk);
  return rule && rule->is_program();
}

bool Actor::has_gradient(size_t chunk) const {
  return part_->spec().is_synchronous ? can_close(chunk, nullptr) : part_->record(chunk).pending != 0;
}

// One at a time: who comes before the program has taken that has to come again.
Outcome Actor::leave(size_t chunk, uint64_t seq, const Source& source) {
  ChunkRecord& record = part_->record(chunk);
  if (record.pending != 0) return Outcome::full;
  const KeyChunk& place = part_->chunk(chunk);
  // until it is pending it is nobody's, so no journal has to keep what was there
  std::memcpy(part_->state(0, chunk), widened(place, source), place.wide_bytes());
  ChunkChange change(*part_, chunk, number_, 0);
  part_->worker(chunk, number_).pushes = seq;
  record.pending = number_ + 1;
  change.commit(0);
  return Outcome::left;
}

Reading Actor::take(size_t chunk, void* gradient, void* weight) {
  const HeldChunk held(*part_, chunk, number_);
  if (!held) return Reading::busy;
  if (!is_of_program(chunk) || !has_gradient(chunk)) return Reading::not_yet;
  const KeyChunk& place = part_->chunk(chunk);
  const void* const next =
      part_->spec().is_synchronous ? sum_of(chunk, contributions(chunk, nullptr)) : part_->state(0, chunk);
  std::memcpy(gradient, next, place.wide_bytes());
  std::memcpy(weight, is_half(place.dtype) ? part_->master(chunk) : part_->value(chunk), place.wide_bytes());
  return Reading::done;
}

// If there is another rule by now, the gradient has gone with the one before.
bool Actor::finish(size_t chunk, const void* weight) {
  {
    const HeldChunk held(*part_, chunk, number_);
    if (!held) return false;
    if (!is_of_program(chunk) || !has_gradient(chunk)) return true;
    const KeyChunk& place = part_->chunk(chunk);
    const bool has_master = is_half(place.dtype);
    ChunkChange change(*part_, chunk, number_, kept(has_master ? kValue | kMaster : kValue));
    if (has_master) std::memcpy(part_->master(chunk), weight, place.wide_bytes());
    store(chunk, weight);
    ChunkRecord& record = part_->record(chunk);
    ++record.updates;
    record.pending = 0;
    if (part_->spec().is_synchronous) let_slots_go(chunk, nullptr);
    change.commit(1);
  }
  part_->ring();
  return true;
}

}  // namespace ringtrain
