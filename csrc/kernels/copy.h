// Memory as bytes: copied and packed, as fast at any alignment, and compared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringtrain {

// As memcpy; does nothing where both are the same memory.
void copy(void* destination, const void* source, size_t bytes);

// Copies into memory that other cores have read, to be read by them again, and learns how.
//
// A core that stores takes each cache line from those that hold it. Between cores that share no cache that takes five
// to ten times as long as to store past the caches (19 us for 512 KB, 208 by memcpy: EPYC, two dies); between those
// that do, the reader may lose more than the writer gains. Nobody tells which cores the two are, and virtual machines
// move them: so both ways are timed, the worse one now and then. Not shared between threads.
class CopyForOthers {
 public:
  void operator()(void* destination, const void* source, size_t bytes);

 private:
  enum Way { kThroughCaches, kPastCaches };

  double s_per_byte_[2] = {0, 0};  // by Way, 0 where not known
  Way better_ = kThroughCaches;
  double next_trial_s_ = 0;  // of the worse one, on the clock of base/clock.h
};

// An array among many that are laid end to end in one buffer, without padding, and back. Borrowed: pack reads `source`,
// unpack writes `destination`; the other one may be null.
struct Piece {
  const void* source;
  void* destination;
  size_t count;  // elements
};

void pack(size_t element_bytes, const std::vector<Piece>& pieces, void* buffer);
void unpack(size_t element_bytes, const void* buffer, const std::vector<Piece>& pieces);

// Returns 64 bits that tell whether two pieces of memory are the same, as fast as memory is read. Two that differ have
// the same digest with a chance of 2^-64, unless somebody tries.
uint64_t digest(const void* data, size_t bytes);

}  // namespace ringtrain
