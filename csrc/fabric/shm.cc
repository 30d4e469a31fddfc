#include "fabric/shm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace ringtrain {
namespace {

std::string path_of(const std::string& name) { return "/dev/shm/" + name; }

Error cannot(const std::string& what, const std::string& name, int code) {
  return failure("cannot " + what + " shared memory " + path_of(name) + ": " + std::strerror(code));
}

}  // namespace

SharedSegment SharedSegment::create(const std::string& name, size_t bytes, Pages pages) {
  const int descriptor = open(path_of(name).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor < 0) throw cannot("create", name, errno);
  const auto length = static_cast<off_t>(bytes);
  const int code = pages == Pages::reserved ? posix_fallocate(descriptor, 0, length)
                                            : (ftruncate(descriptor, length) == 0 ? 0 : errno);
  if (code != 0) {
    close(descriptor);
    ::unlink(path_of(name).c_str());
    throw cannot("reserve " + std::to_string(bytes >> 10) + " KB of", name, code);
  }
  return SharedSegment(name, bytes, descriptor, true);
}

SharedSegment SharedSegment::attach(const std::string& name, size_t bytes) {
  const int descriptor = open(path_of(name).c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) throw cannot("open", name, errno);
  struct stat status;
  if (fstat(descriptor, &status) != 0 || static_cast<size_t>(status.st_size) != bytes) {
    close(descriptor);
    throw failure("shared memory " + path_of(name) +
                  " has another size than expected; do all ranks run the same ringtrain?");
  }
  return SharedSegment(name, bytes, descriptor, false);
}

SharedSegment::SharedSegment(std::string name, size_t bytes, int descriptor, bool owner)
    : bytes_(bytes), descriptor_(descriptor) {
  if (owner) name_ = name;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (data == MAP_FAILED) {
    const int code = errno;
    unlink();
    close(descriptor_);
    throw cannot("map", name, code);
  }
  data_ = static_cast<char*>(data);
}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(bytes_, other.bytes_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  return *this;
}

SharedSegment::~SharedSegment() {
  unlink();
  if (data_) munmap(data_, bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

void SharedSegment::unlink() {
  if (!name_.empty()) ::unlink(path_of(name_).c_str());
  name_.clear();
}

void SharedSegment::reserve(size_t offset, size_t bytes) {
  if (const int code = posix_fallocate(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(bytes)))
    throw failure("cannot reserve " + std::to_string(bytes >> 10) + " KB of /dev/shm: " + std::strerror(code));
}

// Where the system cannot, the pages stay until the segment goes.
void SharedSegment::release(size_t offset, size_t bytes) {
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
}

namespace {

struct flock life_lock(int index) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = index;
  lock.l_len = 1;
  return lock;
}

}  // namespace

void hold_life_lock(int descriptor, int index) {
  struct flock lock = life_lock(index);
  if (fcntl(descriptor, F_SETLK, &lock) != 0)
    throw failure(std::string("cannot lock shared memory: ") + std::strerror(errno));
}

bool is_life_lock_held(int descriptor, int index) {
  struct flock lock = life_lock(index);
  return fcntl(descriptor, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace ringtrain
