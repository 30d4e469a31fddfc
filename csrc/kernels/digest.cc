#include "kernels/digest.h"

#include <cstring>

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

}  // namespace ringtrain
