#include "kvstore/store/layout.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace ringtrain {
namespace {

constexpr size_t kPage = 4096, kLine = 64;
// An update reads some arrays and writes others, those of the last change. If all began alike in their pages, they
// would want the same lines of the cache: with momentum it takes up to three times as long then (the distances are
// measured).
constexpr size_t kBetweenChunks = 27 * kLine, kBetweenArrays = 37 * kLine;
// How a PartSpec says what kind of store it is of.
constexpr uint32_t kSynchronous = 1, kAtomic = 2;
// Of a worker that is ahead of the others: so many rounds of all keys, or of few keys so many pushes.
constexpr size_t kRoundsAhead = 4, kFewestSlots = 256;

size_t up_to(size_t multiple, size_t bytes) { return (bytes + multiple - 1) / multiple * multiple; }

// On multiples of what one word of codes holds, and of a line of the cache.
size_t elements_of_chunk(DType dtype) { return Layout::kChunkBytes / std::max(size_of(dtype), sizeof(float)); }

// Values, and where only some elements are pushed, a range for each at worst, and a number for each chunk.
size_t most_staged(const KeyPiece& piece) {
  const size_t chunks = piece.count / elements_of_chunk(piece.dtype) + 1;
  return piece.count * (size_of(wide(piece.dtype)) + sizeof(ElementRange)) + up_to(kLine, chunks * sizeof(uint32_t)) +
         kLine;
}

}  // namespace

void PartSpec::put(Writer& writer) const {
  writer.put((is_synchronous ? kSynchronous : 0) | (is_atomic ? kAtomic : 0));
  writer.put(max_staleness);
  writer.put(static_cast<int32_t>(capacity));
  writer.put(static_cast<uint64_t>(pieces.size()));
  for (const KeyPiece& piece : pieces) {
    writer.put(piece.key);
    writer.put(static_cast<uint32_t>(piece.dtype));
    writer.put(piece.begin);
    writer.put(piece.count);
  }
}

bool PartSpec::fits_atomic(const KeyPiece& piece) {
  return piece.count <= Layout::kLargestAtomicBytes / size_of(wide(piece.dtype));
}

PartSpec PartSpec::get(Reader& reader) {
  constexpr uint64_t kMostElements = uint64_t{1} << 40, kMostPieces = uint64_t{1} << 24;
  constexpr int32_t kMostWorkers = 1 << 14;
  PartSpec spec;
  const auto kind = reader.get<uint32_t>();
  spec.is_synchronous = (kind & kSynchronous) != 0;
  spec.is_atomic = kind == kAtomic;
  if (kind > kAtomic) throw failure("a message tells of a store of no kind that there is");
  spec.max_staleness = reader.get<int64_t>();
  spec.capacity = reader.get<int32_t>();
  const auto pieces = reader.get<uint64_t>();
  if (spec.capacity < 1 || spec.capacity > kMostWorkers || pieces > kMostPieces)
    throw failure("a message says that a store has " + std::to_string(spec.capacity) + " workers and " +
                  std::to_string(pieces) + " pieces of keys, which cannot be");
  uint64_t elements = 0;
  for (uint64_t i = 0; i < pieces; ++i) {
    KeyPiece piece = {};
    reader.get(piece.key);
    const auto dtype = reader.get<uint32_t>();
    reader.get(piece.begin);
    reader.get(piece.count);
    if (dtype >= kDTypes || piece.count > kMostElements || (elements += piece.count) > kMostElements)
      throw failure("a message tells of a piece of a key that cannot be");
    piece.dtype = static_cast<DType>(dtype);
    if (spec.is_atomic && !PartSpec::fits_atomic(piece))
      throw failure("a message tells of a key that is too large for an atomic store");
    spec.pieces.push_back(piece);
  }
  return spec;
}

Layout::Layout(PartSpec spec) : spec_(std::move(spec)) {
  for (size_t i = 0; i < spec_.pieces.size(); ++i) {
    const KeyPiece& piece = spec_.pieces[i];
    first_chunks_.push_back(chunks_.size());
    const uint64_t most = spec_.is_atomic ? piece.count : elements_of_chunk(piece.dtype);
    for (uint64_t begin = 0; begin < piece.count; begin += most) {
      const auto count = static_cast<uint32_t>(std::min(most, piece.count - begin));
      chunks_.push_back({static_cast<uint32_t>(i), count, begin, piece.dtype, 0, 0});
      chunk_bytes_ = std::max(chunk_bytes_, up_to(kPage, chunks_.back().wide_bytes()));
    }
  }
  first_chunks_.push_back(chunks_.size());
  size_t wide_bytes = 0;
  for (KeyChunk& chunk : chunks_) {
    chunk.value_at = value_bytes_;
    value_bytes_ += room_of(0, chunk) + (is_exchanged(0, chunk) ? kBetweenChunks : 0);
    chunk.wide_at = wide_bytes;
    wide_bytes += room_of(1, chunk) + (is_exchanged(1, chunk) ? kBetweenChunks : 0);
  }

  const size_t of_workers = capacity() * sizeof(WorkerRecord);
  static_assert(sizeof(StageRecord) <= kStageStride);
  stage_records_at_ = up_to(kLine, sizeof(PartHeader) + capacity() * sizeof(WorkerPlace));
  controls_at_ = stage_records_at_ + capacity() * kStageStride;
  control_stride_ = up_to(kLine, sizeof(ChunkRecord) + of_workers);
  journal_places_at_ = controls_at_ + chunks_.size() * control_stride_;
  journals_at_ = up_to(kPage, journal_place_at(journals()));
  journal_header_bytes_ = up_to(kPage, sizeof(JournalRecord) + sizeof(ChunkRecord) - kChunkKeptAt + of_workers);
  spare_stride_ = chunk_bytes_ + kBetweenArrays;
  journal_stride_ = up_to(kPage, journal_header_bytes_ + kArrays * spare_stride_);
  slot_controls_at_ = journals_at_ + journals() * journal_stride_;
  if (spec_.is_synchronous) slots_ = static_cast<uint32_t>(std::max(kRoundsAhead * chunks_.size(), kFewestSlots));
  values_at_ = slot_controls_at_ + capacity() * slot_control_bytes();
  wide_at_ = values_at_ + up_to(kPage, value_bytes_);
  wide_stride_ = up_to(kPage, wide_bytes) + kBetweenArrays;
  slots_at_ = wide_at_ + (kArrays - 1) * wide_stride_;
  stages_at_ = slots_at_ + capacity() * slots_ * chunk_bytes_;
  if (!spec_.is_synchronous && !spec_.is_atomic)
    for (const KeyPiece& piece : spec_.pieces) stage_bytes_ = std::max(stage_bytes_, up_to(kPage, most_staged(piece)));
  bytes_ = stages_at_ + capacity() * stage_bytes_;
}

size_t Layout::second_place(size_t array, const KeyChunk& chunk) { return up_to(kLine, chunk.bytes_of(array)); }

size_t Layout::slot_control_bytes() const { return up_to(kPage, slots_ * sizeof(SlotRecord)); }

size_t Layout::slot_control_at(size_t worker, uint32_t slot) const {
  return slot_controls_at_ + worker * slot_control_bytes() + (slot - 1) * sizeof(SlotRecord);
}

ChunkRows rows_of_piece(const Layout& layout, size_t piece, const std::vector<int64_t>& rows, size_t elements,
                        bool all_chunks) {
  ChunkRows found;
  size_t first = 0;  // row that ends behind the beginning of the chunk
  for (size_t number = layout.first_chunk(piece); number < layout.first_chunk(piece + 1); ++number) {
    const KeyChunk& chunk = layout.chunks()[number];
    const uint64_t begin = layout.spec().pieces[piece].begin + chunk.begin, end = begin + chunk.count;
    const auto begin_of = [&](size_t i) { return static_cast<uint64_t>(rows[i]) * elements; };
    while (first < rows.size() && begin_of(first) + elements <= begin) ++first;
    RowsOfChunk of_chunk{static_cast<uint32_t>(number), {}, 0, 0};
    for (size_t i = first; i < rows.size() && begin_of(i) < end; ++i) {
      const uint64_t from = std::max(begin, begin_of(i)), to = std::min(end, begin_of(i) + elements);
      if (of_chunk.count == 0) of_chunk.begin = i * elements + (from - begin_of(i));
      of_chunk.count += to - from;
      const auto there = static_cast<uint32_t>(from - begin), count = static_cast<uint32_t>(to - from);
      auto& ranges = of_chunk.ranges;
      if (!ranges.empty() && ranges.back().begin + ranges.back().count == there)
        ranges.back().count += count;
      else
        ranges.push_back({there, count});
    }
    if (all_chunks || of_chunk.count > 0) found.push_back(std::move(of_chunk));
  }
  return found;
}

}  // namespace ringtrain
