#include "collectives/nccl_buffer.h"

namespace ringtrain {
namespace {

constexpr int kSuccess = 0;
constexpr size_t kBytes = 16 << 20;

}  // namespace

NcclBuffer::~NcclBuffer() { drop(); }

bool NcclBuffer::prepare() {
  const NcclLibrary& library = comm_.library();
  if (!library.MemAlloc || !library.CommRegister) return false;
  if (library.MemAlloc(&memory_, kBytes) != kSuccess) {
    memory_ = nullptr;
    return false;
  }
  if (library.CommRegister(comm_.handle(), memory_, kBytes, &registration_) == kSuccess) return true;
  registration_ = nullptr;
  drop();
  return false;
}

// When the communicator has been ended, its registrations went with it.
void NcclBuffer::drop() {
  const NcclLibrary& library = comm_.library();
  if (registration_ && comm_.handle()) library.CommDeregister(comm_.handle(), registration_);
  if (memory_) library.MemFree(memory_);
  registration_ = memory_ = nullptr;
}

char* NcclBuffer::get(size_t bytes) {
  if (memory_ && bytes <= kBytes) return static_cast<char*>(memory_);
  block_.reset();
  block_ = pool_.take(bytes);
  return block_->data();
}

}  // namespace ringtrain
