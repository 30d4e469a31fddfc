#include "memory/rings.h"

#include <algorithm>
#include <cstring>

namespace ringtrain {
namespace {

constexpr size_t kPage = 4096;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

// All rings of a node may be mapped, so those of many ranks are short.
size_t Rings::capacity(int size) {
  constexpr size_t kMost = size_t{128} << 10, kLeast = size_t{16} << 10, kMostOfAll = size_t{1} << 30;
  const auto pairs = static_cast<size_t>(size) * static_cast<size_t>(size);
  return std::clamp(whole_pages(kMostOfAll / pairs), kLeast, kMost) - sizeof(Ring);
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
      has_pages_(static_cast<size_t>(size)),
      seen_taken_(static_cast<size_t>(size)) {}

size_t Rings::offset_of(int from, int to) const {
  const size_t number = static_cast<size_t>(from) * static_cast<size_t>(size_) + static_cast<size_t>(to);
  return begin_ / kPage * kPage + first_ring(size_) + number * (capacity_ + sizeof(Ring));
}

bool Rings::put(int to, const void* head, size_t head_bytes, const void* data, size_t bytes) {
  if (!has_pages_[static_cast<size_t>(to)]) {
    segment_.reserve(offset_of(index_, to), capacity_ + sizeof(Ring));
    has_pages_[static_cast<size_t>(to)] = true;
  }
  Ring& ring = this->ring(index_, to);
  const uint64_t put = ring.put.load(std::memory_order_relaxed);
  const size_t place = put % capacity_, needed = room_for(head_bytes + bytes);
  const size_t skipped = place + needed > capacity_ ? capacity_ - place : 0;
  uint64_t& taken = seen_taken_[static_cast<size_t>(to)];
  const auto has_room = [&] { return put + skipped + needed - taken <= capacity_; };
  const auto looks_again = [&] {
    taken = ring.taken.load(std::memory_order_seq_cst);
    return has_room();
  };
  if (!has_room() && !looks_again()) {
    ring.wants_room.store(1, std::memory_order_seq_cst);
    if (!looks_again()) return false;
  }
  if (skipped > 0) *reinterpret_cast<uint64_t*>(data_of(ring) + place) = kSkip;
  char* const at = data_of(ring) + (skipped > 0 ? 0 : place);
  *reinterpret_cast<uint64_t*>(at) = head_bytes + bytes;
  std::memcpy(at + sizeof(uint64_t), head, head_bytes);
  if (bytes > 0) std::memcpy(at + sizeof(uint64_t) + head_bytes, data, bytes);
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
