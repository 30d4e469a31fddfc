#include "kernels/copy.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/clock.h"
#include "kernels/reduce.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

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

constexpr bool kCanPassCaches = true;

void copy_past_caches(char* to, const char* from, size_t bytes) {
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    __m128i line[kLine / sizeof(__m128i)];
    std::memcpy(line, from, kLine);
    for (size_t i = 0; i < std::size(line); ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
  }
  std::memcpy(to, from, bytes);
  _mm_sfence();
}
#else
constexpr bool is_slow_for_memcpy(const void*, const void*, size_t) { return false; }

constexpr bool kCanPassCaches = false;

void copy_past_caches(char*, const char*, size_t) {}
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

void CopyForOthers::operator()(void* destination, const void* source, size_t bytes) {
  constexpr size_t kLong = 32 << 10;
  // A writer that is a little faster does not pay for what the reader loses.
  constexpr double kMuch = 2.5;
  constexpr double kRest = 200;  // times the trial's own time until the next
  if (!kCanPassCaches || bytes < kLong) return copy(destination, source, bytes);
  const double begin = now_s();
  const bool is_trial = begin >= next_trial_s_;
  const Way way = is_trial == (better_ == kThroughCaches) ? kPastCaches : kThroughCaches;
  if (way == kPastCaches)
    copy_past_caches(static_cast<char*>(destination), static_cast<const char*>(source), bytes);
  else
    copy(destination, source, bytes);
  const double end = now_s(), measured = (end - begin) / static_cast<double>(bytes);
  double& known = s_per_byte_[way];
  known = known == 0 ? measured : std::min(measured, 2 * known);  // others may have run on the core meanwhile
  better_ = s_per_byte_[kPastCaches] * kMuch < s_per_byte_[kThroughCaches] ? kPastCaches : kThroughCaches;
  if (is_trial) next_trial_s_ = end + kRest * (end - begin);
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
