#include "collectives/gpu/staged_group.h"

#include <algorithm>

#include "base/error.h"
#include "collectives/piece_layout.h"

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

// Of what each rank has, the part from `offset` on that is no longer than `share`.
Counts part_of(const Counts& all, size_t offset, size_t share) {
  Counts part(all.size());
  for (size_t r = 0; r < all.size(); ++r) part[r] = std::min(all[r] - std::min(all[r], offset), share);
  return part;
}

size_t largest(const Counts& counts) { return counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end()); }

// The share of one rank in a part, in whole cache lines so that every element is whole.
size_t share_of(size_t part_bytes, int ranks) {
  constexpr size_t kLine = 64;
  return std::max(kLine, part_bytes / static_cast<size_t>(ranks) / kLine * kLine);
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

void StagedGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  const size_t element = size_of(reduction.dtype);
  const PieceLayout layout(pieces, element);
  const size_t share = Relay::part_bytes(layout.total() * element) / element;
  const auto length = [&](size_t k) { return chunk_of(layout.total(), share, k).count; };
  PieceLayout::Cursor loading, storing;
  relay_.run(
      chunks_of(layout.total(), share),
      [&](size_t k, char* slot) {
        layout.for_each(loading, k * share, length(k), [&](const char* source, char*, size_t offset, size_t count) {
          gpu_.copy(slot + offset * element, source, count * element, gpu_.stream());
        });
      },
      [&](size_t k, char* slot) {
        const std::vector<Piece> part = {{slot, slot, length(k)}};
        if (use_arena_)
          host_->allreduce_registered(reduction, part);
        else
          host_->allreduce(reduction, part);
      },
      [&](size_t k, const char* slot) {
        layout.for_each(storing, k * share, length(k),
                        [&](const char*, char* destination, size_t offset, size_t count) {
                          gpu_.copy(destination, slot + offset * element, count * element, gpu_.upload_stream());
                        });
      });
}

void StagedGroup::reduce_scatter(const Reduction& reduction, const void* source, void* destination,
                                 const Counts& counts) {
  const size_t element = size_of(reduction.dtype);
  const Counts bytes = in_bytes(counts, element);
  const size_t share = share_of(Relay::part_bytes(total_of(bytes)), size());
  const auto own = static_cast<size_t>(rank());
  relay_.run(
      chunks_of(largest(bytes), share),
      [&](size_t k, char* slot) { load(slot, source, bytes, part_of(bytes, k * share, share), k * share); },
      [&](size_t k, char* slot) {
        Counts part = part_of(bytes, k * share, share);
        char* result = slot + offsets_of(part)[own];
        for (size_t& count : part) count /= element;
        host_->reduce_scatter(reduction, slot, result, part);
      },
      [&](size_t k, const char* slot) {
        const Counts part = part_of(bytes, k * share, share);
        gpu_.copy(static_cast<char*>(destination) + k * share, slot + offsets_of(part)[own], part[own],
                  gpu_.upload_stream());
      });
}

void StagedGroup::allgather(const void* source, void* destination, const Counts& bytes) {
  const size_t share = share_of(Relay::part_bytes(total_of(bytes)), size());
  const auto own = static_cast<size_t>(rank());
  relay_.run(
      chunks_of(largest(bytes), share),
      [&](size_t k, char* slot) {
        const Counts part = part_of(bytes, k * share, share);
        gpu_.copy(slot + offsets_of(part)[own], static_cast<const char*>(source) + k * share, part[own], gpu_.stream());
      },
      [&](size_t k, char* slot) {
        const Counts part = part_of(bytes, k * share, share);
        host_->allgather(slot + offsets_of(part)[own], slot, part);
      },
      [&](size_t k, const char* slot) {
        store(destination, slot, bytes, part_of(bytes, k * share, share), k * share);
      });
}

void StagedGroup::broadcast(void* data, size_t bytes, int root) {
  const size_t share = Relay::part_bytes(bytes);
  const auto at = [&](size_t k) { return static_cast<char*>(data) + k * share; };
  const auto length = [&](size_t k) { return std::min(share, bytes - k * share); };
  relay_.run(
      chunks_of(bytes, share),
      [&](size_t k, char* slot) {
        if (rank() == root) gpu_.copy(slot, at(k), length(k), gpu_.stream());
      },
      [&](size_t k, char* slot) { host_->broadcast(slot, length(k), root); },
      [&](size_t k, const char* slot) {
        if (rank() != root) gpu_.copy(at(k), slot, length(k), gpu_.upload_stream());
      });
}

// The first half of a slot is sent, the second one is received.
void StagedGroup::alltoall(const void* source, const Counts& send_bytes, void* destination,
                           const Counts& receive_bytes) {
  const size_t half = Relay::kMostBytes / 2;
  const size_t share = share_of(half, size());
  // The others may have more parts for each other than this rank has.
  parts_ = static_cast<int64_t>(chunks_of(std::max(largest(send_bytes), largest(receive_bytes)), share));
  host_->allreduce({DType::int64, Reduce::max}, {{&parts_, &parts_, 1}});
  relay_.run(
      static_cast<size_t>(parts_),
      [&](size_t k, char* slot) { load(slot, source, send_bytes, part_of(send_bytes, k * share, share), k * share); },
      [&](size_t k, char* slot) {
        host_->alltoall(slot, part_of(send_bytes, k * share, share), slot + half,
                        part_of(receive_bytes, k * share, share));
      },
      [&](size_t k, const char* slot) {
        store(destination, slot + half, receive_bytes, part_of(receive_bytes, k * share, share), k * share);
      });
}

void StagedGroup::load(char* slot, const void* source, const Counts& all, const Counts& part, size_t offset) const {
  const Counts from = offsets_of(all), to = offsets_of(part);
  for (size_t r = 0; r < all.size(); ++r)
    gpu_.copy(slot + to[r], static_cast<const char*>(source) + from[r] + offset, part[r], gpu_.stream());
}

void StagedGroup::store(void* destination, const char* slot, const Counts& all, const Counts& part,
                        size_t offset) const {
  const Counts from = offsets_of(part), to = offsets_of(all);
  for (size_t r = 0; r < all.size(); ++r)
    gpu_.copy(static_cast<char*>(destination) + to[r] + offset, slot + from[r], part[r], gpu_.upload_stream());
}

void CudaMpiGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  if (reduction.scale != 1.0 || is_half(reduction.dtype) || !Library::can(reduction))
    return StagedGroup::allreduce(reduction, pieces);
  const size_t element = size_of(reduction.dtype);
  for (const Piece& piece : pieces) gpu().copy(piece.destination, piece.source, piece.count * element, gpu().stream());
  gpu().wait(*gpu().record(gpu().stream()), peers_.watch());
  for (const Piece& piece : pieces) library_.allreduce_in_place(reduction, piece.destination, piece.count);
}

}  // namespace ringtrain
