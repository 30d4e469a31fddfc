#include "collectives/shm/shm_group.h"

#include <cstring>

#include "base/error.h"
#include "kernels/copy.h"

namespace ringtrain {
namespace {

// Of a slot. Groups that have a few numbers at a time, as many of many do, need the first kind only.
constexpr size_t kTinyBytes = 1 << 10, kSmallBytes = 16 << 10;

char* at(void* data, size_t offset) { return static_cast<char*>(data) + offset; }
const char* at(const void* data, size_t offset) { return static_cast<const char*>(data) + offset; }

}  // namespace

MailboxGeometry MailboxGeometry::of(int size, size_t largest_mailbox_bytes, int cores) {
  constexpr size_t kCache = 16 << 20, kPage = 4096, kSmallest = 1024;
  const int depth = size > cores ? 4 : 2;
  const size_t mailboxes = static_cast<size_t>(size) * static_cast<size_t>(size - 1) * static_cast<size_t>(depth);
  size_t bytes = std::min(largest_mailbox_bytes, kCache / mailboxes);
  bytes = bytes >= kPage ? bytes / kPage * kPage : std::max(bytes / 64 * 64, kSmallest);
  return {size, bytes, depth};
}

size_t ShmGroup::reserved_bytes(const MailboxGeometry& geometry) {
  return static_cast<size_t>(geometry.size) * (sizeof(Control) + 2 * kTinyBytes);
}

size_t ShmGroup::segment_bytes(const MailboxGeometry& geometry) {
  return reserved_bytes(geometry) + static_cast<size_t>(geometry.size) * (2 * kSmallBytes + geometry.rows_bytes());
}

ShmGroup::ShmGroup(NodeMemory memory, int rank, const Tuning& tuning, Watch& watch)
    : Group(rank, memory.geometry.size),
      memory_(std::move(memory)),
      slots_{reserved_bytes(memory_.geometry), 2 * kSmallBytes},
      rows_{slots_.first + static_cast<size_t>(size()) * slots_.bytes, memory_.geometry.rows_bytes()},
      tuning_(tuning),
      watch_(watch),
      copies_(static_cast<size_t>(memory_.geometry.size)) {}

AlgorithmChoices ShmGroup::choices() {
  const char* const options = "shared_memory, mailbox_kb";
  const std::string pipeline = "shared memory, through mailboxes";
  const std::string at_once = "shared memory, every rank adds up all arrays";
  return {{"allreduce", 0, at_once, "shared_memory"},
          {"allreduce", kSmallBytes + 1, pipeline, options},
          {"allreduce of ringtrain.empty", 0, at_once, "shared_memory"},
          {"allreduce of ringtrain.empty", kSmallBytes + 1, "shared memory, in place without a copy", "shared_memory"},
          {"reducescatter", 0, pipeline, options},
          {"allgather", 0, pipeline, options},
          {"broadcast", 0, pipeline, options},
          {"alltoall", 0, pipeline, options}};
}

char* ShmGroup::small_slot(int rank, uint32_t number, size_t bytes) {
  if (bytes > kTinyBytes) return of_rank(slots_, rank) + number % 2 * kSmallBytes;
  char* first = memory_.mailboxes.data() + static_cast<size_t>(size()) * sizeof(Control);
  return first + (2 * static_cast<size_t>(rank) + number % 2) * kTinyBytes;
}

char* ShmGroup::own_slot(uint32_t number, size_t bytes) {
  if (bytes > kTinyBytes) reserve_own(slots_);
  return small_slot(rank(), number, bytes);
}

char* ShmGroup::row(int from, uint32_t chunk) {
  const MailboxGeometry& geometry = memory_.geometry;
  return of_rank(rows_, from) + chunk % static_cast<uint32_t>(geometry.depth) * geometry.row_bytes();
}

void ShmGroup::reserve_own(Part& part) {
  if (std::exchange(part.is_reserved, true)) return;
  memory_.mailboxes.reserve(part.first + static_cast<size_t>(rank()) * part.bytes, part.bytes);
}

char* ShmGroup::mailbox(int from, int to, uint32_t chunk) {
  const int place = to > from ? to - 1 : to;  // nobody writes to itself
  return row(from, chunk) + static_cast<size_t>(place) * memory_.geometry.mailbox_bytes;
}

int ShmGroup::who_has_not(Flag Control::* stage, uint32_t count) {
  for (int i = 1; i < size(); ++i) {
    const int peer = (rank() + i) % size();
    if (!(control(peer).*stage).reached(count)) return peer;
  }
  return -1;
}

void ShmGroup::wait_for_all(Flag Control::* stage, uint32_t count) {
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) wait_for(control(peer).*stage, count);
}

template <typename Put, typename Get>
void ShmGroup::stream(size_t chunks, Put put, Get get) {
  reserve_own(rows_);
  Control& mine = control(rank());
  const uint32_t first = next_chunk_;
  for (size_t k = 0; k <= chunks; ++k) {
    const auto chunk = first + static_cast<uint32_t>(k);
    if (k < chunks) {
      wait_for_all(&Control::got, got_before(chunk));
      put(k, chunk);
      mine.put.publish(chunk + 1);
    }
    if (k > 0) {
      get(k - 1, chunk - 1);
      mine.summed.publish(chunk);
      mine.got.publish(chunk);
    }
  }
  next_chunk_ = first + static_cast<uint32_t>(chunks);
}

void ShmGroup::allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  const PieceLayout layout(pieces, size_of(reduction.dtype));
  if (layout.total() * size_of(reduction.dtype) <= kSmallBytes) return small_allreduce(reduction, pieces);
  reserve_own(rows_);
  ShmAllreduce(*this, reduction, layout).run();
}

void ShmGroup::small_allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) {
  const PieceLayout layout(pieces, size_of(reduction.dtype));
  const size_t element = size_of(reduction.dtype);
  const uint32_t number = small_number_++;
  const size_t bytes = layout.total() * element;
  char* mine = own_slot(number, bytes);
  PieceLayout::Cursor out, in;
  layout.for_each(out, 0, layout.total(), [&](const char* source, char*, size_t offset, size_t count) {
    copy(mine + offset * element, source, count * element);
  });
  // A slot is written again two operations later. By then everybody has announced the one between, so has read this
  // one.
  control(rank()).small.publish(number + 1);
  wait_for_all(&Control::small, number + 1);
  std::vector<const void*> sources(static_cast<size_t>(size()));
  layout.for_each(in, 0, layout.total(), [&](const char*, char* destination, size_t offset, size_t count) {
    for (int peer = 0; peer < size(); ++peer) sources[peer] = small_slot(peer, number, bytes) + offset * element;
    void* result = destination;
    reduce(reduction, &result, 1, sources.data(), size(), count);
  });
}

// In the order of the ranks, as small_allreduce().
bool ShmGroup::reduce_values(const Reduction& reduction, const Sources& sources, void* destination, size_t count) {
  reduce(reduction, &destination, 1, sources.data(), static_cast<int>(sources.size()), count);
  return true;
}

void ShmGroup::allreduce_registered(const Reduction& reduction, const std::vector<Piece>& pieces) {
  size_t elements = 0;
  for (const Piece& piece : pieces) elements += piece.count;
  if (elements * size_of(reduction.dtype) <= kSmallBytes) return allreduce(reduction, pieces);
  constexpr size_t kMost = kSmallBytes / sizeof(uint64_t);
  for (size_t begin = 0; begin < pieces.size(); begin += kMost)
    reduce_own_slice(reduction, pieces.data() + begin, std::min(kMost, pieces.size() - begin));
}

std::vector<std::vector<char*>> ShmGroup::exchange_places(const Piece* first, size_t count) {
  const uint32_t number = small_number_++;
  const size_t bytes = count * sizeof(uint64_t);
  char* mine = own_slot(number, bytes);
  for (size_t i = 0; i < count; ++i) {
    const std::optional<size_t> offset = memory_.arena->find(first[i].destination, 0);
    if (!offset) throw failure("an array that was agreed to be in shared memory is not");
    const uint64_t place = *offset;
    std::memcpy(mine + i * sizeof(place), &place, sizeof(place));
  }
  control(rank()).small.publish(number + 1);
  wait_for_all(&Control::small, number + 1);
  std::vector<std::vector<char*>> places(static_cast<size_t>(size()));
  for (int peer = 0; peer < size(); ++peer) {
    for (size_t i = 0; i < count; ++i) {
      uint64_t place;
      std::memcpy(&place, small_slot(peer, number, bytes) + i * sizeof(place), sizeof(place));
      places[peer].push_back(memory_.arena->at(memory_.arena_members[peer], place));
    }
  }
  return places;
}

void ShmGroup::reduce_own_slice(const Reduction& reduction, const Piece* first, size_t count) {
  const size_t element = size_of(reduction.dtype);
  const std::vector<std::vector<char*>> places = exchange_places(first, count);
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) total += first[i].count;
  const Counts counts = even_slices(total, size());
  const size_t begin = offsets_of(counts)[rank()], end = begin + counts[rank()];

  std::vector<const void*> sources(static_cast<size_t>(size()));
  std::vector<void*> destinations(static_cast<size_t>(size()));
  size_t piece_begin = 0;
  for (size_t i = 0; i < count; piece_begin += first[i].count, ++i) {
    const size_t from = std::max(begin, piece_begin), to = std::min(end, piece_begin + first[i].count);
    if (from >= to) continue;
    for (int peer = 0; peer < size(); ++peer)
      sources[peer] = destinations[peer] = places[peer][i] + (from - piece_begin) * element;
    reduce(reduction, destinations.data(), size(), sources.data(), size(), to - from);
  }
  barrier();
}

void ShmGroup::reduce_scatter_all(const Reduction& reduction, const std::vector<Scattering>& arrays) {
  const size_t element = size_of(reduction.dtype);
  const size_t step = memory_.geometry.mailbox_bytes / element;
  std::vector<Counts> counts;
  for (const Scattering& array : arrays) counts.push_back(array.counts);
  const PartStreams streams(std::move(counts), size());
  std::vector<PartStreams::Cursor> puts(static_cast<size_t>(size()));
  PartStreams::Cursor sum;
  std::vector<const void*> sources(static_cast<size_t>(size()));
  const auto source_of = [&](const PartStreams::Stretch& it) {
    return at(arrays[it.array].source, it.in_array * element);
  };
  stream(
      chunks_of(streams.longest(), step),
      [&](size_t, uint32_t chunk) {
        for (int peer = 0; peer < size(); ++peer) {
          if (peer == rank()) continue;
          char* box = mailbox(rank(), peer, chunk);
          streams.for_next(puts[peer], peer, step, [&](const PartStreams::Stretch& it) {
            copies_[peer](box + it.offset * element, source_of(it), it.count * element);
          });
        }
      },
      [&](size_t, uint32_t chunk) {
        wait_for_all(&Control::put, chunk + 1);
        streams.for_next(sum, rank(), step, [&](const PartStreams::Stretch& it) {
          for (int peer = 0; peer < size(); ++peer)
            sources[peer] = peer == rank() ? source_of(it) : mailbox(peer, rank(), chunk) + it.offset * element;
          void* result = at(arrays[it.array].destination, it.in_part * element);
          reduce(reduction, &result, 1, sources.data(), size(), it.count);
        });
      });
}

// A rank copies its own data together with that of the others, while it is in the cache.
void ShmGroup::allgather_all(const std::vector<Gathering>& arrays) {
  std::vector<Counts> counts;
  for (const Gathering& array : arrays) counts.push_back(array.bytes);
  const PartStreams streams(std::move(counts), size());
  const size_t step = memory_.geometry.row_bytes();
  PartStreams::Cursor put;
  std::vector<PartStreams::Cursor> gets(static_cast<size_t>(size()));
  stream(
      chunks_of(streams.longest(), step),
      [&](size_t, uint32_t chunk) {
        char* own = row(rank(), chunk);
        streams.for_next(put, rank(), step, [&](const PartStreams::Stretch& it) {
          copies_[rank()](own + it.offset, at(arrays[it.array].source, it.in_part), it.count);
        });
      },
      [&](size_t, uint32_t chunk) {
        streams.for_next(gets[rank()], rank(), step, [&](const PartStreams::Stretch& it) {
          copy(at(arrays[it.array].destination, it.in_array), at(arrays[it.array].source, it.in_part), it.count);
        });
        for (int i = 1; i < size(); ++i) {
          const int peer = (rank() + i) % size();
          if (streams.is_at_end(gets[peer], peer)) continue;
          wait_for(control(peer).put, chunk + 1);
          const char* theirs = row(peer, chunk);
          streams.for_next(gets[peer], peer, step, [&](const PartStreams::Stretch& it) {
            copy(at(arrays[it.array].destination, it.in_array), theirs + it.offset, it.count);
          });
        }
      });
}

void ShmGroup::broadcast_all(const std::vector<Piece>& pieces, int root) {
  const PieceLayout layout(pieces, 1);
  PieceLayout::Cursor cursor;  // a rank either puts or gets
  const size_t step = memory_.geometry.row_bytes();
  stream(
      chunks_of(layout.total(), step),
      [&](size_t k, uint32_t chunk) {
        if (rank() != root) return;
        char* own = row(root, chunk);
        layout.for_each(cursor, k * step, step, [&](const char*, const char* data, size_t offset, size_t bytes) {
          copies_[rank()](own + offset, data, bytes);
        });
      },
      [&](size_t k, uint32_t chunk) {
        if (rank() == root) return;
        wait_for(control(root).put, chunk + 1);
        const char* theirs = row(root, chunk);
        layout.for_each(cursor, k * step, step, [&](const char*, char* data, size_t offset, size_t bytes) {
          copy(data, theirs + offset, bytes);
        });
      });
}

void ShmGroup::alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) {
  const size_t step = memory_.geometry.mailbox_bytes;
  const Counts send_offsets = offsets_of(send_bytes), receive_offsets = offsets_of(receive_bytes);
  // Nobody knows how much the others send to each other, so all agree on the number of chunks first.
  size_t most = std::max(*std::max_element(send_bytes.begin(), send_bytes.end()),
                         *std::max_element(receive_bytes.begin(), receive_bytes.end()));
  auto chunks = static_cast<int64_t>(chunks_of(most, step));
  small_allreduce({DType::int64, Reduce::max}, {{&chunks, &chunks, 1}});
  copy(at(destination, receive_offsets[rank()]), at(source, send_offsets[rank()]), send_bytes[rank()]);
  stream(
      static_cast<size_t>(chunks),
      [&](size_t k, uint32_t chunk) {
        for (int peer = 0; peer < size(); ++peer) {
          const Chunk part = chunk_of(send_bytes[peer], step, k);
          if (peer != rank())
            copies_[peer](mailbox(rank(), peer, chunk), at(source, send_offsets[peer] + part.offset), part.count);
        }
      },
      [&](size_t k, uint32_t chunk) {
        for (int i = 1; i < size(); ++i) {
          const int peer = (rank() + i) % size();
          const Chunk part = chunk_of(receive_bytes[peer], step, k);
          if (part.count == 0) continue;
          wait_for(control(peer).put, chunk + 1);
          copy(at(destination, receive_offsets[peer] + part.offset), mailbox(peer, rank(), chunk), part.count);
        }
      });
}

void ShmGroup::barrier() {
  const uint32_t number = small_number_++;
  control(rank()).small.publish(number + 1);
  wait_for_all(&Control::small, number + 1);
}

ShmAllreduce::ShmAllreduce(ShmGroup& group, const Reduction& reduction, const PieceLayout& layout)
    : group_(group),
      reduction_(reduction),
      layout_(layout),
      element_(size_of(reduction.dtype)),
      rank_(group.rank()),
      size_(group.size()),
      chunk_(static_cast<size_t>(size_) *
             (std::min(group.memory_.geometry.mailbox_bytes, group.tuning_.mailbox_bytes) / element_)),
      chunks_((layout.total() + chunk_ - 1) / chunk_),
      first_(group.next_chunk_),
      put_cursors_(static_cast<size_t>(size_)),
      get_cursors_(static_cast<size_t>(size_)),
      sources_(static_cast<size_t>(size_)) {}

ShmAllreduce::Slice ShmAllreduce::slice(size_t k, int owner) const {
  const size_t line = 64 / element_;
  const size_t length = std::min(chunk_, layout_.total() - k * chunk_);
  const size_t ranks = static_cast<size_t>(size_), place = static_cast<size_t>(owner);
  const size_t usual = ((length + ranks - 1) / ranks + line - 1) / line * line;
  const size_t begin = std::min(length, place * usual), end = std::min(length, (place + 1) * usual);
  return {k * chunk_ + begin, end - begin};
}

void ShmAllreduce::run() {
  while (got_ < chunks_) {
    if (can_get())
      get();
    else if (can_sum())
      sum();
    else if (can_put())
      put();
    else
      wait_for_what_is_next();
  }
  group_.next_chunk_ = number(chunks_);
}

// This rank got its results from its own mailboxes, which no rank reads after all owners have summed them. Only
// what an operation before this one has left in a row may still be read by others.
bool ShmAllreduce::can_put() const {
  const size_t depth = static_cast<size_t>(group_.memory_.geometry.depth);
  const bool is_free = put_ >= depth || group_.who_has_not(&Control::got, group_.got_before(number(put_))) < 0;
  return put_ < chunks_ && put_ < got_ + depth && is_free;
}

bool ShmAllreduce::can_sum() const {
  return summed_ < put_ && group_.who_has_not(&Control::put, number(summed_) + 1) < 0;
}

bool ShmAllreduce::can_get() const {
  return got_ < summed_ && group_.who_has_not(&Control::summed, number(got_) + 1) < 0;
}

void ShmAllreduce::put() {
  for (int i = 1; i < size_; ++i) {
    const int owner = (rank_ + i) % size_;
    const Slice part = slice(put_, owner);
    char* mailbox = group_.mailbox(rank_, owner, number(put_));
    layout_.for_each(put_cursors_[owner], part.begin, part.count,
                     [&](const char* source, char*, size_t offset, size_t count) {
                       copy(mailbox + offset * element_, source, count * element_);
                     });
  }
  group_.control(rank_).put.publish(number(put_) + 1);
  ++put_;
}

void ShmAllreduce::sum() {
  const Slice part = slice(summed_, rank_);
  layout_.for_each(sum_cursor_, part.begin, part.count,
                   [&](const char* source, char* destination, size_t offset, size_t count) {
                     destinations_.assign(1, destination);
                     for (int peer = 0; peer < size_; ++peer) {
                       if (peer == rank_) continue;
                       char* mailbox = group_.mailbox(peer, rank_, number(summed_)) + offset * element_;
                       sources_[peer] = mailbox;
                       destinations_.push_back(mailbox);
                     }
                     sources_[rank_] = source;
                     reduce(reduction_, destinations_.data(), size_, sources_.data(), size_, count);
                   });
  group_.control(rank_).summed.publish(number(summed_) + 1);
  ++summed_;
}

void ShmAllreduce::get() {
  for (int i = 1; i < size_; ++i) {
    const int owner = (rank_ + i) % size_;
    const Slice part = slice(got_, owner);
    const char* mailbox = group_.mailbox(rank_, owner, number(got_));
    layout_.for_each(get_cursors_[owner], part.begin, part.count,
                     [&](const char*, char* destination, size_t offset, size_t count) {
                       copy(destination, mailbox + offset * element_, count * element_);
                     });
  }
  group_.control(rank_).got.publish(number(got_) + 1);
  ++got_;
}

// Only for one of those who are missing: what it brings may let another stage go on.
void ShmAllreduce::wait_for_what_is_next() {
  Flag Control::* stage = got_ < summed_ ? &Control::summed : summed_ < put_ ? &Control::put : &Control::got;
  const uint32_t count = got_ < summed_   ? number(got_) + 1
                         : summed_ < put_ ? number(summed_) + 1
                                          : group_.got_before(number(put_));
  const int peer = group_.who_has_not(stage, count);
  if (peer >= 0) group_.wait_for(group_.control(peer).*stage, count);
}

}  // namespace ringtrain
