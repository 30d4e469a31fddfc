#include "collectives/gpu/relay.h"

#include <algorithm>

#include "base/error.h"

namespace ringtrain {
namespace {

constexpr size_t kBytes = Relay::kSlots * Relay::kMostBytes;

// Null where the Arena is full, or the driver does not take such memory.
std::shared_ptr<char> pinned_in_arena(const Gpu& gpu, Arena& arena) {
  try {
    return gpu.pin(arena.allocate(kBytes), kBytes);
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace

bool Relay::prepare() {
  if (memory_) return is_in_arena_;
  if (arena_) memory_ = pinned_in_arena(*gpu_, *arena_);
  is_in_arena_ = memory_ != nullptr;
  if (!memory_) memory_ = gpu_->pinned(kBytes);
  return is_in_arena_;
}

size_t Relay::part_bytes(size_t total_bytes) {
  constexpr size_t kParts = 8, kFewest = 256 << 10, kUnit = 4096;
  return std::clamp(total_bytes / kParts, kFewest, kMostBytes) / kUnit * kUnit;
}

}  // namespace ringtrain
