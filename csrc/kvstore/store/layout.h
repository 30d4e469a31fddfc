// The memory of the keys of one create() at one server, and the place of each thing in that Part.
//
// A key is cut into pieces, one for each server that has some of it; a piece into chunks of at most 64 KB, or, in an
// atomic store, into one chunk. The layout follows from the pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/dtype.h"
#include "kvstore/store/records.h"

namespace ringtrain {

struct KeyPiece {
  uint32_t key;           // its number in the store
  DType dtype;            // of the values
  uint64_t begin, count;  // elements of the key
};

// The same at all servers and workers.
struct PartSpec {
  static constexpr int64_t kNoBound = -1;

  bool is_synchronous = false;
  int64_t max_staleness = kNoBound;  // of asynchronous stores
  int capacity = 1;                  // the most workers there may ever be
  std::vector<KeyPiece> pieces;
  // Of asynchronous stores: each key is one chunk, so a push changes it as a whole, and a pull reads it as a whole.
  bool is_atomic = false;

  // Whether an atomic store can have such a piece.
  static bool fits_atomic(const KeyPiece& piece);

  void put(Writer& writer) const;
  // Throws failure where the bytes are not those of a spec that can be.
  static PartSpec get(Reader& reader);
};

struct KeyChunk {
  uint32_t piece, count;  // elements
  uint64_t begin;         // element of the piece
  DType dtype;            // of the values
  uint64_t value_at;      // byte of the values
  uint64_t wide_at;       // byte of each of the arrays that are in the wide dtype

  size_t value_bytes() const { return count * size_of(dtype); }
  size_t wide_bytes() const { return count * size_of(wide(dtype)); }
  // 0: the value, 1: the master, from 2 on: the states.
  size_t bytes_of(size_t array) const { return array == 0 ? value_bytes() : wide_bytes(); }
};

// Elements [begin, begin + count) of a chunk.
struct ElementRange {
  uint32_t begin, count;
};
using ElementRanges = std::vector<ElementRange>;  // in order, none twice

inline size_t count_of(const ElementRanges& ranges) {
  size_t count = 0;
  for (const ElementRange& range : ranges) count += range.count;
  return count;
}

class Layout {
 public:
  static constexpr size_t kChunkBytes = 64 << 10;             // of the wide dtype; of stores that are not atomic
  static constexpr size_t kLargestAtomicBytes = 256ul << 20;  // likewise, of a chunk of an atomic store

  explicit Layout(PartSpec spec);

  const PartSpec& spec() const { return spec_; }
  size_t capacity() const { return static_cast<size_t>(spec_.capacity); }
  // Those who change chunks: workers, and then the server itself.
  uint32_t actor_of_server() const { return static_cast<uint32_t>(capacity()); }
  // As many as may change chunks at a time: each worker, the server in its name, a process that was stopped in a change
  // and whose place another one has, and threads of the server.
  uint32_t journals() const { return 3 * actor_of_server() + 4; }

  const std::vector<KeyChunk>& chunks() const { return chunks_; }
  // The chunks of a piece follow each other: first(piece) up to first(piece + 1).
  size_t first_chunk(size_t piece) const { return first_chunks_[piece]; }
  // Whether a push to the piece changes several chunks, and has to count in all of them or in none.
  bool is_pushed_as_a_whole(size_t piece) const {
    return !spec_.is_synchronous && first_chunk(piece + 1) - first_chunk(piece) > 1;
  }
  uint32_t slots() const { return slots_; }  // of each worker, numbered from 1
  // No chunk has more in the wide dtype.
  size_t chunk_bytes() const { return chunk_bytes_; }

  // Bytes from the beginning of the memory.
  size_t chunk_control_at(size_t chunk) const { return controls_at_ + chunk * control_stride_; }
  size_t journal_place_at(size_t journal) const { return journal_places_at_ + journal * sizeof(JournalPlace); }
  size_t journal_at(size_t journal) const { return journals_at_ + journal * journal_stride_; }
  size_t spare_at(size_t journal, size_t array) const {
    return journal_at(journal) + journal_header_bytes_ + array * spare_stride_;
  }
  // Whether a change puts the array where a journal has its spare one, which gets its place. Others are too small for
  // the next change, and have a second place behind their home.
  bool is_exchanged(size_t array, const KeyChunk& chunk) const { return chunk.bytes_of(array) == chunk_bytes_; }
  static size_t second_place(size_t array, const KeyChunk& chunk);  // bytes from its home
  // Of the home and, if there is one, the second place.
  size_t room_of(size_t array, const KeyChunk& chunk) const {
    return second_place(array, chunk) * (is_exchanged(array, chunk) ? 1 : 2);
  }
  size_t stage_record_at(size_t worker) const { return stage_records_at_ + worker * kStageStride; }
  // The values of a StageRecord. Where only some elements are pushed, the number of ranges of each chunk and these
  // ranges precede them.
  size_t stage_at(size_t worker) const { return stages_at_ + worker * stage_bytes_; }
  size_t stage_bytes() const { return stage_bytes_; }  // 0: no push of this Part has several chunks
  size_t slot_control_at(size_t worker, uint32_t slot) const;
  size_t slot_at(size_t worker, uint32_t slot) const { return slots_at_ + (worker * slots_ + slot - 1) * chunk_bytes_; }
  size_t array_at(size_t array) const { return array == 0 ? values_at_ : wide_at_ + (array - 1) * wide_stride_; }
  // The home of an array: it is there, or as far from there as ChunkRecord::moved says.
  size_t array_at(size_t array, const KeyChunk& chunk) const {
    return array_at(array) + (array == 0 ? chunk.value_at : chunk.wide_at);
  }
  size_t control_bytes() const { return journals_at_; }  // header, controls of chunks, places of journals
  size_t journal_header_bytes() const { return journal_header_bytes_; }
  size_t slot_control_bytes() const;  // of each worker
  size_t value_bytes() const { return value_bytes_; }
  size_t wide_bytes() const { return wide_stride_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kStageStride = 192;  // whole lines

  PartSpec spec_;
  std::vector<KeyChunk> chunks_;
  std::vector<size_t> first_chunks_;
  uint32_t slots_ = 0;
  size_t chunk_bytes_ = kChunkBytes;
  size_t value_bytes_ = 0;
  size_t controls_at_ = 0, control_stride_ = 0;
  size_t journal_places_at_ = 0, journals_at_ = 0, journal_stride_ = 0, journal_header_bytes_ = 0, spare_stride_ = 0;
  size_t stage_records_at_ = 0, stages_at_ = 0, stage_bytes_ = 0;
  size_t slot_controls_at_ = 0, values_at_ = 0, wide_at_ = 0, wide_stride_ = 0, slots_at_ = 0, bytes_ = 0;
};

// Some rows of a key, as one chunk sees them: which of its elements, and where these are in an array of the rows, one
// behind the other.
struct RowsOfChunk {
  uint32_t chunk;
  ElementRanges ranges;
  size_t begin, count;  // elements of that array
};

using ChunkRows = std::vector<RowsOfChunk>;

// `rows`: in order, each once, of `elements` each. With `all_chunks` also chunks without a row.
ChunkRows rows_of_piece(const Layout& layout, size_t piece, const std::vector<int64_t>& rows, size_t elements,
                        bool all_chunks);

}  // namespace ringtrain
