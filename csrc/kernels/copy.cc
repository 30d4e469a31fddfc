#include "kernels/copy.h"

#include <cstring>

#include "kernels/reduce.h"

namespace ringtrain {
namespace {

constexpr uint64_t kOdd[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F};  // random bits
constexpr size_t kLanes = 4;  // multiplications that do not wait for each other

uint64_t rotated(uint64_t word, int bits) { return (word << bits) | (word >> (64 - bits)); }

// Every bit of the word reaches every bit of the result.
uint64_t spread(uint64_t word) {
  word = (word ^ (word >> 32)) * kOdd[0];
  word = (word ^ (word >> 29)) * kOdd[1];
  return word ^ (word >> 32);
}

void mix(uint64_t& lane, const char* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  lane = rotated(lane + word * kOdd[1], 31) * kOdd[0];
}

#if defined(__x86_64__)
// From 2 KB on glibc copies by the processor's own instruction (rep movsb). On AMD's Zen that takes five to ten times
// as long where the destination begins up to 31 bytes behind the source, page offset by page offset (glibc's bug
// 30994). Arrays of NumPy begin 16 bytes behind a page, and mailboxes on a cache line, so every so many meet this.
bool is_slow_for_memcpy(const void* destination, const void* source, size_t bytes) {
  constexpr uintptr_t kPage = 4096, kNear = 32;
  constexpr size_t kLong = 2048;
  const uintptr_t behind = (reinterpret_cast<uintptr_t>(destination) - reinterpret_cast<uintptr_t>(source)) % kPage;
  return bytes > kLong && behind > 0 && behind < kNear;
}
#else
constexpr bool is_slow_for_memcpy(const void*, const void*, size_t) { return false; }
#endif

}  // namespace

uint64_t digest(const void* data, size_t bytes) {
  constexpr size_t kWord = sizeof(uint64_t), kStep = kLanes * kWord;
  const char* at = static_cast<const char*>(data);
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  size_t rest = bytes;
  for (; rest >= kStep; at += kStep, rest -= kStep)
    for (size_t lane = 0; lane < kLanes; ++lane) mix(lanes[lane], at + lane * kWord);
  char tail[kStep] = {};
  if (rest > 0) std::memcpy(tail, at, rest);
  for (size_t lane = 0; lane < kLanes; ++lane) mix(lanes[lane], tail + lane * kWord);
  uint64_t result = bytes;
  for (const uint64_t lane : lanes) result = spread(result ^ lane) + lane;
  return result;
}

void copy(void* destination, const void* source, size_t bytes) {
  if (bytes == 0 || destination == source) return;
  if (is_slow_for_memcpy(destination, source, bytes))
    reduce({DType::uint8}, &destination, 1, &source, 1, bytes);  // a sum of one
  else
    std::memcpy(destination, source, bytes);
}

void pack(size_t element_bytes, const std::vector<Piece>& pieces, void* buffer) {
  char* next = static_cast<char*>(buffer);
  for (const Piece& piece : pieces) {
    const size_t bytes = piece.count * element_bytes;
    copy(next, piece.source, bytes);
    next += bytes;
  }
}

void unpack(size_t element_bytes, const void* buffer, const std::vector<Piece>& pieces) {
  const char* next = static_cast<const char*>(buffer);
  for (const Piece& piece : pieces) {
    const size_t bytes = piece.count * element_bytes;
    copy(piece.destination, next, bytes);
    next += bytes;
  }
}

}  // namespace ringtrain
