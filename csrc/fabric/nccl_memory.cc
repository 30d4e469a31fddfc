#include "fabric/nccl_memory.h"

#include <algorithm>

#include "fabric/run_apart.h"

namespace ringtrain {
namespace {

constexpr int kSuccess = 0;
constexpr size_t kUnit = 4096;

}  // namespace

NcclMemory::~NcclMemory() {
  const Gpu::Current current(*gpu_);
  for (const Block& block : blocks_) library_.MemFree(block.data);
}

std::shared_ptr<char> NcclMemory::allocate(size_t bytes) {
  if (!library_.MemAlloc || !library_.CommRegister) return nullptr;
  const Gpu::Current current(*gpu_);
  const size_t rounded = std::max(kUnit, (bytes + kUnit - 1) / kUnit * kUnit);
  char* data = take_free(rounded);
  if (!data) data = make(rounded);
  if (!data) return nullptr;
  return {data, [memory = shared_from_this()](char* own) { memory->give_back(own); }};
}

char* NcclMemory::take_free(size_t bytes) {
  char* data = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto fits = [&](const Block& block) { return block.is_free && block.bytes == bytes; };
    const auto found = std::find_if(blocks_.begin(), blocks_.end(), fits);
    if (found == blocks_.end()) return nullptr;
    data = found->data;
    found->is_free = false;
  }
  if (is_soon_idle()) return data;
  give_back(data);
  return nullptr;
}

// The driver can only be asked to wait, for ever if need be, so that is left to a thread of its own.
bool NcclMemory::is_soon_idle() const {
  constexpr double kLongest_s = 1;
  const auto call = [gpu = gpu_] {
    const Gpu::Current current(*gpu);
    return gpu->driver().CtxSynchronize();
  };
  LimitWatch limit(kLongest_s, "the GPU is at work");
  try {
    return run_apart(call, limit) == kSuccess;
  } catch (const Error&) {
    return false;
  }
}

char* NcclMemory::make(size_t bytes) {
  void* data = nullptr;
  if (library_.MemAlloc(&data, bytes) != kSuccess) return nullptr;
  const std::lock_guard lock(mutex_);
  blocks_.push_back({static_cast<char*>(data), bytes, false});
  made_.store(blocks_.size(), std::memory_order_release);
  return static_cast<char*>(data);
}

void NcclMemory::give_back(const char* data) {
  const std::lock_guard lock(mutex_);
  for (Block& block : blocks_)
    if (block.data == data) block.is_free = true;
}

bool NcclMemory::holds(const void* memory, size_t bytes) {
  if (made_.load(std::memory_order_acquire) == 0) return false;
  const auto* first = static_cast<const char*>(memory);
  const std::lock_guard lock(mutex_);
  return std::any_of(blocks_.begin(), blocks_.end(), [&](const Block& block) {
    return first >= block.data && first + bytes <= block.data + block.bytes;
  });
}

bool NcclMemory::introduce_to(NcclComm& comm) {
  if (comm.known_memory() == made_.load(std::memory_order_acquire)) return false;
  const std::lock_guard lock(mutex_);
  for (size_t i = comm.known_memory(); i < blocks_.size(); ++i) comm.get_to_know(blocks_[i].data, blocks_[i].bytes);
  return true;
}

}  // namespace ringtrain
