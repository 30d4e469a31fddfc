// Memory as bytes: copied and packed, as fast at any alignment, and compared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringtrain {

// As memcpy; does nothing where both are the same memory.
void copy(void* destination, const void* source, size_t bytes);

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
