#include "memory/rings.h"

#include <algorithm>
#include <cstring>

namespace ringtrain {
namespace {

constexpr size_t kPage = 4096;
// From here on a ring that is empty begins at its first byte again.
constexpr size_t kShort = size_t{128} << 10;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

// All rings of a node may be mapped, so those of many ranks are short; and all may be used, so those of a few ranks are
// long.
size_t Rings::capacity(int size) {
  constexpr size_t kMost = size_t{2} << 20, kLeast = size_t{16} << 10;
  constexpr size_t kMostOfLong = size_t{16} << 20, kMostOfAll = size_t{1} << 30;
  const auto pairs = static_cast<size_t>(size) * static_cast<size_t>(size);
  const size_t most = std::clamp(whole_pages(kMostOfLong / pairs), kShort, kMost);
  return std::clamp(whole_pages(kMostOfAll / pairs), kLeast, most) - sizeof(Ring);
}

// From the beginning of the Rings on, which may be anywhere in a page: a page more.
size_t Rings::first_ring(int size) { return whole_pages(reserved_bytes(size)) + kPage; }

size_t Rings::bytes(int size) {
  const auto rings = static_cast<size_t>(size) * static_cast<size_t>(size);
  return first_ring(size) + rings * (capacity(size) + sizeof(Ring));
}

Rings::Rings(SharedSegment& segment, size_t begin, int size, int index)
    : segment_(segment),
      begin_(begin),
      size_(size),
      index_(index),
      capacity_(capacity(size)),
      copies_(static_cast<size_t>(size)),
      reserved_(static_cast<size_t>(size)),
      seen_taken_(static_cast<size_t>(size)) {}

size_t Rings::offset_of(int from, int to) const {
  const size_t number = static_cast<size_t>(from) * static_cast<size_t>(size_) + static_cast<size_t>(to);
  return begin_ / kPage * kPage + first_ring(size_) + number * (capacity_ + sizeof(Ring));
}

void Rings::reserve(int to, size_t bytes) {
  size_t& reserved = reserved_[static_cast<size_t>(to)];
  if (bytes <= reserved) return;
  const size_t end = std::min((bytes + kShort - 1) / kShort * kShort, sizeof(Ring) + capacity_);
  segment_.reserve(offset_of(index_, to) + reserved, end - reserved);
  reserved = end;
}

bool Rings::put(int to, const void* head, size_t head_bytes, const void* data, size_t bytes) {
  reserve(to, sizeof(Ring));
  Ring& ring = this->ring(index_, to);
  const uint64_t put = ring.put.load(std::memory_order_relaxed);
  const size_t place = put % capacity_, needed = room_for(head_bytes + bytes);
  uint64_t& taken = seen_taken_[static_cast<size_t>(to)];
  const auto look = [&] { return taken = ring.taken.load(std::memory_order_seq_cst); };
  const bool begins_again = place + needed > capacity_ || (place >= std::max(kShort, needed) && look() == put);
  const size_t skipped = begins_again ? capacity_ - place : 0;
  const auto has_room = [&] { return put + skipped + needed - taken <= capacity_; };
  const auto has_room_now = [&] { return look(), has_room(); };
  if (!has_room() && !has_room_now()) {
    ring.wants_room.store(1, std::memory_order_seq_cst);
    if (!has_room_now()) return false;
  }
  reserve(to, sizeof(Ring) + (begins_again ? std::max(needed, place + sizeof(uint64_t)) : place + needed));
  if (skipped > 0) *reinterpret_cast<uint64_t*>(data_of(ring) + place) = kSkip;
  char* const at = data_of(ring) + (skipped > 0 ? 0 : place);
  *reinterpret_cast<uint64_t*>(at) = head_bytes + bytes;
  std::memcpy(at + sizeof(uint64_t), head, head_bytes);
  if (bytes > 0) copies_[static_cast<size_t>(to)](at + sizeof(uint64_t) + head_bytes, data, bytes);
  ring.put.store(put + skipped + needed, std::memory_order_release);
  return true;
}

// A bit that is set already has not been looked at since, so what has been put will be found with it.
bool Rings::call(int to) {
  std::atomic<uint64_t>& word = call_of(to)[index_ / 64];
  const uint64_t bit = uint64_t{1} << (index_ % 64);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if ((word.load(std::memory_order_relaxed) & bit) != 0) return false;
  word.fetch_or(bit, std::memory_order_seq_cst);
  Bells& bells = bells_of(to);
  bells.bell.ring();
  return bells.rings_doorbell.load(std::memory_order_seq_cst) != 0;
}

bool Rings::is_called() const {
  for (size_t word = 0; word < call_words(); ++word)
    if (call_of(index_)[word].load(std::memory_order_seq_cst) != 0) return true;
  return false;
}

}  // namespace ringtrain
