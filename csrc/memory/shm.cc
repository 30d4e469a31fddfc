#include "memory/shm.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/signals.h"

namespace ringtrain {
namespace {

constexpr const char* kFolder = "/dev/shm";
// Of a ticket: a descriptor, and what tells the file from others.
constexpr int kIdentityBits = 40;
constexpr uint64_t kIdentityMask = (uint64_t{1} << kIdentityBits) - 1;

std::string path_of(const std::string& name) { return std::string(kFolder) + "/" + name; }

Error cannot(const std::string& what, const std::string& path, int code) {
  const char* const remedy = "; give it more memory, in a container by --shm-size, or set RINGTRAIN_SHARED_MEMORY=off";
  return failure("cannot " + what + " shared memory " + path + ": " + std::strerror(code) +
                 (code == ENOSPC ? remedy : ""));
}

// Inodes of one file system are near each other, and so are the numbers of file systems in memory.
uint64_t identity_of(const struct stat& status) {
  constexpr int kUsualInodeBits = 20;
  return (status.st_ino ^ uint64_t{minor(status.st_dev)} << kUsualInodeBits) & kIdentityMask;
}

struct OpenFile {
  int descriptor;  // -1: none
  struct stat status;
};

// A file of this user's, with this identity if one is given. Anything else is looked at, but not opened: there are
// devices for which that means something, and to close a file again would end the life lock of this process on it.
OpenFile open_own(const std::string& path, int more_flags, std::optional<uint64_t> identity = std::nullopt) {
  OpenFile file = {-1, {}};
  const int looked_at = open(path.c_str(), O_PATH | O_CLOEXEC | more_flags);
  if (looked_at < 0) return file;
  if (fstat(looked_at, &file.status) == 0 && S_ISREG(file.status.st_mode) && file.status.st_uid == geteuid() &&
      identity_of(file.status) == identity.value_or(identity_of(file.status)))
    file.descriptor = open(("/proc/self/fd/" + std::to_string(looked_at)).c_str(), O_RDWR | O_CLOEXEC);
  close(looked_at);
  return file;
}

// The descriptor of a segment of that size.
int require_size(const OpenFile& file, size_t bytes, const std::string& path) {
  if (static_cast<size_t>(file.status.st_size) == bytes) return file.descriptor;
  close(file.descriptor);
  throw failure("shared memory " + path + " has another size than expected; do all ranks run the same ringtrain?");
}

// 0, or why there are no pages. The tmpfs of older kernels gives up when a signal comes, and those of a timer may come
// faster than many pages. Only what cannot be blocked still comes, such as SIGSTOP.
int reserve_pages(int descriptor, size_t offset, size_t bytes) {
  const WithoutSignals blocked;
  int code;
  do code = posix_fallocate(descriptor, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  while (code == EINTR);
  return code;
}

// Of segments that nobody can be about to attach to any more.
constexpr time_t kAbandoned_s = 60;

void remove_if_abandoned(const std::string& name) {
  const OpenFile file = open_own(path_of(name), O_NOFOLLOW);
  if (file.descriptor < 0) return;  // another user's, or just unlinked
  const bool is_old = time(nullptr) - file.status.st_mtime > kAbandoned_s;
  if (is_old && flock(file.descriptor, LOCK_EX | LOCK_NB) == 0) unlink(path_of(name).c_str());
  close(file.descriptor);
}

void remove_abandoned() {
  DIR* folder = opendir(kFolder);
  if (!folder) return;
  while (const dirent* entry = readdir(folder))
    if (std::strncmp(entry->d_name, "ringtrain-", std::strlen("ringtrain-")) == 0) remove_if_abandoned(entry->d_name);
  closedir(folder);
}

}  // namespace

SharedSegment SharedSegment::create(size_t bytes, size_t reserved) {
  remove_abandoned();
  const int descriptor = open(kFolder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor < 0) throw cannot("create", kFolder, errno);
  flock(descriptor, LOCK_SH);  // says that its creator lives
  int code = ftruncate(descriptor, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (code == 0 && reserved > 0) code = reserve_pages(descriptor, 0, reserved);
  if (code == 0) return SharedSegment(bytes, descriptor);
  close(descriptor);
  throw cannot("reserve " + std::to_string(reserved >> 10) + " KB of", kFolder, code);
}

SharedSegment SharedSegment::attach(int64_t creator_pid, uint64_t ticket, size_t bytes) {
  const std::string path = "/proc/" + std::to_string(creator_pid) + "/fd/" + std::to_string(ticket >> kIdentityBits);
  // The same pid may be another process here, such as this one in a PID namespace, or has become one.
  const OpenFile file = open_own(path, 0, ticket & kIdentityMask);
  if (file.descriptor >= 0) return SharedSegment(bytes, require_size(file, bytes, path));
  throw failure("the shared memory of process " + std::to_string(creator_pid) + " cannot be seen from here");
}

SharedSegment SharedSegment::attach(const std::string& name, size_t bytes) {
  const OpenFile file = open_own(path_of(name), O_NOFOLLOW);
  if (file.descriptor < 0) throw failure("cannot open shared memory " + path_of(name) + " as a file of this user");
  return SharedSegment(bytes, require_size(file, bytes, path_of(name)));
}

SharedSegment::SharedSegment(size_t bytes, int descriptor) : bytes_(bytes), descriptor_(descriptor) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (data == MAP_FAILED) {
    const int code = errno;
    close(descriptor_);
    throw cannot("map", kFolder, code);
  }
  data_ = static_cast<char*>(data);
}

uint64_t SharedSegment::ticket() const {
  struct stat status = {};
  fstat(descriptor_, &status);
  return static_cast<uint64_t>(descriptor_) << kIdentityBits | identity_of(status);
}

void SharedSegment::publish(const std::string& name) {
  const std::string own = "/proc/self/fd/" + std::to_string(descriptor_);
  if (linkat(AT_FDCWD, own.c_str(), AT_FDCWD, path_of(name).c_str(), AT_SYMLINK_FOLLOW) != 0)
    throw cannot("name", path_of(name), errno);
  name_ = name;
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
  if (const int code = reserve_pages(descriptor_, offset, bytes))
    throw cannot("reserve " + std::to_string(bytes >> 10) + " KB of", kFolder, code);
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
