// A piece of memory that the ranks of one node share, and the signs of life of its ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ringtrain {

// A file in /dev/shm, mapped. Exactly one process creates it; the others attach afterwards; the creator unlinks the
// name as soon as all are attached, so nothing is left behind whatever happens later.
class SharedSegment {
 public:
  // Both throw Error(failure) saying what could not be had. The memory is zero. Pages that are not reserved when the
  // segment is created must be before they are used: so a full /dev/shm is an error and not a SIGBUS later.
  enum class Pages { reserved, none };
  static SharedSegment create(const std::string& name, size_t bytes, Pages pages);
  static SharedSegment attach(const std::string& name, size_t bytes);

  SharedSegment() = default;
  SharedSegment(SharedSegment&& other) noexcept { *this = static_cast<SharedSegment&&>(other); }
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  void unlink();
  // Whole pages. Reserving what is reserved changes nothing; released pages are zero when they are reserved again.
  void reserve(size_t offset, size_t bytes);
  void release(size_t offset, size_t bytes);
  char* data() const { return data_; }
  int descriptor() const { return descriptor_; }

 private:
  SharedSegment(std::string name, size_t bytes, int descriptor, bool owner);

  std::string name_;  // empty once unlinked, and in who attached
  size_t bytes_ = 0;
  int descriptor_ = -1;
  char* data_ = nullptr;
};

// A lock that the kernel releases when its process ends, however it ends: byte `index` of the file behind `descriptor`.
// Unlike a pid it is never mistaken: not by zombies, by reused pids, or from another pid namespace.
void hold_life_lock(int descriptor, int index);
bool is_life_lock_held(int descriptor, int index);

}  // namespace ringtrain
