#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>

#include "call.h"
#include "nccl.h"

namespace gpu_double {
namespace {

// Null where the process is not there, or has not got that far.
Shared* try_to_map(const Place& place) {
  const std::string path = "/proc/" + std::to_string(place.pid) + "/fd/" + std::to_string(place.descriptor);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* address = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (address == MAP_FAILED) throw Refusal{nccl::kSystemError, path + " cannot be mapped"};
  return static_cast<Shared*>(address);
}

Shared* map(const Place& place, const Patience& patience) {
  for (;;) {
    if (Shared* shared = try_to_map(place)) return shared;
    patience();
    usleep(1000);
  }
}

void require_same_size(Word& agreed, int size) {
  uint32_t none = 0;
  const auto own = static_cast<uint32_t>(size);
  if (!agreed.compare_exchange_strong(none, own) && none != own)
    throw Refusal{nccl::kInvalidArgument, "the ranks differ in how many they are"};
}

}  // namespace

void sleep_while(const Word& word, uint32_t value) {
  const timespec most{0, 50'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
}

void wake_all(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

void meet(Word& arrived, uint32_t round, int size, const Patience& patience) {
  const uint32_t all = (round + 1) * static_cast<uint32_t>(size);
  if (++arrived == all) wake_all(arrived);
  // The counts may wrap around.
  for (uint32_t now = arrived; static_cast<int32_t>(now - all) < 0; now = arrived) {
    patience();
    sleep_while(arrived, now);
  }
}

Place new_place() {
  const int file = memfd_create("gpu_double", MFD_CLOEXEC);
  if (file < 0) throw Refusal{nccl::kSystemError, "no file in memory"};
  if (ftruncate(file, sizeof(Shared)) == 0) return {getpid(), file};
  close(file);
  throw Refusal{nccl::kSystemError, "a file in memory has no room"};
}

void release(const Place& place) {
  if (place.pid == getpid()) close(place.descriptor);
}

Segment::Segment(const Place& place, int rank, int size, const CUuuid& uuid, const Patience& patience)
    : shared_(map(place, patience)) {
  try {
    require_same_size(shared_->size, size);
    if (shared_->ranks[rank].has_joined.exchange(1) != 0)
      throw Refusal{nccl::kInvalidUsage, "rank " + std::to_string(rank) + " has joined already"};
    shared_->ranks[rank].uuid = uuid;
    meet(shared_->joined, 0, size, patience);
    release(place);
  } catch (const Refusal&) {
    release(place);
    munmap(shared_, sizeof(Shared));
    throw;
  }
}

Segment::~Segment() { munmap(shared_, sizeof(Shared)); }

}  // namespace gpu_double
