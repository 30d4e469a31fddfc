#include "kvstore/store/part_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace ringtrain {

PartMemory PartMemory::create_shared(size_t bytes) {
  SharedSegment segment = SharedSegment::create(bytes, SharedSegment::Pages::none);
  char* const data = segment.data();
  return {std::move(segment), data, bytes};
}

PartMemory PartMemory::create_private(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED)
    throw failure("cannot have " + std::to_string(bytes >> 20) + " MB for keys: " + std::strerror(errno));
  return {SharedSegment(), static_cast<char*>(data), bytes};
}

PartMemory PartMemory::attach(int64_t creator_pid, uint64_t ticket, size_t bytes) {
  SharedSegment segment = SharedSegment::attach(creator_pid, ticket, bytes);
  char* const data = segment.data();
  return {std::move(segment), data, bytes};
}

PartMemory::PartMemory(SharedSegment segment, char* data, size_t bytes)
    : segment_(std::move(segment)), data_(data), bytes_(bytes) {}

PartMemory::PartMemory(PartMemory&& other) noexcept
    : segment_(std::move(other.segment_)), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

PartMemory::~PartMemory() {
  if (!is_shared() && data_) munmap(data_, bytes_);
}

void PartMemory::reserve(size_t offset, size_t bytes) {
  if (is_shared() && bytes > 0) segment_.reserve(offset, bytes);
}

}  // namespace ringtrain
