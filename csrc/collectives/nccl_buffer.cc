#include "collectives/nccl_buffer.h"

#include <algorithm>

namespace ringtrain {
namespace {

constexpr int kSuccess = 0;
constexpr size_t kFirstBytes = 4 << 20;

}  // namespace

NcclBuffer::~NcclBuffer() { free(); }

char* NcclBuffer::get(size_t bytes) {
  if (bytes > bytes_) {
    const size_t wanted = std::max({bytes, 2 * bytes_, kFirstBytes});
    if (memory_) comm_.gpu()->wait(*comm_.gpu()->record(comm_.gpu()->stream()), watch_);
    free();
    if (!allocate(wanted)) block_ = pool_.take(wanted);
    bytes_ = wanted;
  }
  return memory_ ? static_cast<char*>(memory_) : block_->data();
}

bool NcclBuffer::allocate(size_t bytes) {
  const NcclLibrary& library = comm_.library();
  if (!library.MemAlloc || !library.CommRegister) return false;
  if (library.MemAlloc(&memory_, bytes) != kSuccess) {
    memory_ = nullptr;
    return false;
  }
  if (library.CommRegister(comm_.handle(), memory_, bytes, &registration_) != kSuccess) registration_ = nullptr;
  return true;
}

// When the communicator has been closed, its registrations went with it.
void NcclBuffer::free() {
  const NcclLibrary& library = comm_.library();
  if (registration_ && comm_.handle()) library.CommDeregister(comm_.handle(), registration_);
  if (memory_) library.MemFree(memory_);
  registration_ = memory_ = nullptr;
  block_.reset();
  bytes_ = 0;
}

}  // namespace ringtrain
