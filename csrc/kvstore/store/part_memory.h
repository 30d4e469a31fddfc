// The memory of a Part: shared with the other processes of the host, or private where nothing is shared.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/shm.h"

namespace ringtrain {

// It is zero, and large parts of it are never used: who uses some reserves it before.
class PartMemory {
 public:
  static PartMemory create_shared(size_t bytes);
  static PartMemory create_private(size_t bytes);
  static PartMemory attach(int64_t creator_pid, uint64_t ticket, size_t bytes);

  PartMemory(PartMemory&& other) noexcept;
  PartMemory& operator=(PartMemory&&) = delete;
  ~PartMemory();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool is_shared() const { return segment_.data() != nullptr; }
  uint64_t ticket() const { return segment_.ticket(); }  // of shared memory

  // Throws failure where a full /dev/shm has no more. Reserving what is reserved changes nothing.
  void reserve(size_t offset, size_t bytes);

 private:
  PartMemory(SharedSegment segment, char* data, size_t bytes);

  SharedSegment segment_;
  char* data_;
  size_t bytes_;
};

}  // namespace ringtrain
