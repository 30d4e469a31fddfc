#include "collectives/gpu/nccl_buffer.h"

#include <optional>

namespace ringtrain {
namespace {

constexpr int kSuccess = 0;
constexpr size_t kBytes = 16 << 20;

}  // namespace

NcclBuffer::~NcclBuffer() {
  try {
    drop();
  } catch (const Error&) {
    // Nobody answers any more: it goes with the process.
  }
}

bool NcclBuffer::prepare() {
  const NcclLibrary& library = comm_.library();
  if (!library.MemAlloc || !library.CommRegister) return false;
  if (library.MemAlloc(&memory_, kBytes) != kSuccess) {
    memory_ = nullptr;
    return false;
  }
  const std::optional<void*> registration = comm_.register_buffer(memory_, kBytes);
  registration_ = registration.value_or(nullptr);
  if (!registration) drop();
  return registration.has_value();
}

void NcclBuffer::drop() {
  comm_.deregister(registration_);
  if (memory_) comm_.library().MemFree(memory_);
  registration_ = memory_ = nullptr;
}

char* NcclBuffer::get(size_t bytes) {
  if (memory_ && bytes <= kBytes) return static_cast<char*>(memory_);
  block_.reset();
  block_ = pool_.take(bytes);
  return block_->data();
}

}  // namespace ringtrain
