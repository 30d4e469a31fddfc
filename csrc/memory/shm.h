// A piece of memory that the ranks of one node share, and the signs of life of its ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ringtrain {

// A file in /dev/shm, mapped. Exactly one process creates it, without a name, so that nothing is left behind whatever
// happens; the others open it through /proc. Where they cannot look into the creator's process (in a pid namespace of
// their own), it gets a name until all are attached; if all die before that, the name goes with a later create().
class SharedSegment {
 public:
  // Both throw Error(failure) saying what could not be had. The memory is zero. The first `reserved` bytes have pages;
  // others must be reserved before they are used: so a full /dev/shm is an error and not a SIGBUS later.
  static SharedSegment create(size_t bytes, size_t reserved);
  static SharedSegment attach(int64_t creator_pid, uint64_t ticket, size_t bytes);
  static SharedSegment attach(const std::string& name, size_t bytes);

  SharedSegment() = default;
  SharedSegment(SharedSegment&& other) noexcept { *this = static_cast<SharedSegment&&>(other); }
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  // The number that others need to attach, besides the creator's pid. Its highest bit is not set.
  uint64_t ticket() const;
  void publish(const std::string& name);
  void unlink();
  // Whole pages. Reserving what is reserved changes nothing; released pages are zero when they are reserved again.
  void reserve(size_t offset, size_t bytes);
  void release(size_t offset, size_t bytes);
  char* data() const { return data_; }
  int descriptor() const { return descriptor_; }

 private:
  SharedSegment(size_t bytes, int descriptor);

  std::string name_;  // while it is published, in who did so
  size_t bytes_ = 0;
  int descriptor_ = -1;
  char* data_ = nullptr;
};

// A lock that the kernel releases when its process ends, however it ends: byte `index` of the file behind `descriptor`.
// Unlike a pid it is never mistaken: not by zombies, by reused pids, or from another pid namespace.
void hold_life_lock(int descriptor, int index);
bool is_life_lock_held(int descriptor, int index);

}  // namespace ringtrain
