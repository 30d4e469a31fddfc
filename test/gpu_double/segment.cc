#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "call.h"
#include "nccl.h"

namespace gpu_double {
namespace {

Shared* map(const std::string& name) {
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) throw Refusal{nccl::kSystemError, "the segment " + name + " cannot be opened"};
  void* address = MAP_FAILED;
  if (ftruncate(file, sizeof(Shared)) == 0)
    address = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (address == MAP_FAILED) throw Refusal{nccl::kSystemError, "the segment " + name + " cannot be mapped"};
  return static_cast<Shared*>(address);
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

std::string Segment::new_name() {
  uint64_t number = 0;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number)) throw Refusal{nccl::kSystemError, "no random number"};
  return "/ringtrain_gpu_double_" + std::to_string(number);
}

Segment::Segment(const std::string& name, int rank, int size, const CUuuid& uuid, const Patience& patience)
    : shared_(map(name)) {
  try {
    require_same_size(shared_->size, size);
    if (shared_->ranks[rank].has_joined.exchange(1) != 0)
      throw Refusal{nccl::kInvalidUsage, "rank " + std::to_string(rank) + " has joined already"};
    shared_->ranks[rank].uuid = uuid;
    meet(shared_->joined, 0, size, patience);
    shm_unlink(name.c_str());
  } catch (const Refusal&) {
    shm_unlink(name.c_str());
    munmap(shared_, sizeof(Shared));
    throw;
  }
}

Segment::~Segment() { munmap(shared_, sizeof(Shared)); }

}  // namespace gpu_double
