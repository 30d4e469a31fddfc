#include "memory/gpu_memory.h"

#include <algorithm>
#include <utility>

namespace ringtrain {
namespace {

constexpr size_t kUnit = 64 << 10;

}  // namespace

void GpuBlock::is_used_until(GpuEventPtr event) {
  const Lock lock(mutex_);
  used_until_ = std::move(event);
}

GpuEventPtr GpuBlock::end_of_use() {
  const Lock lock(mutex_);
  return std::exchange(used_until_, nullptr);
}

GpuPool::~GpuPool() { free_all(); }

GpuBlockPtr GpuPool::take(size_t bytes) {
  const size_t rounded = std::max(kUnit, (bytes + kUnit - 1) / kUnit * kUnit);
  std::unique_ptr<GpuBlock> block = find(rounded);
  if (!block) block = allocate(rounded);
  if (const GpuEventPtr used_until = block->end_of_use()) used_until->let_wait(gpu_->stream());
  return owned_here(block.release(), [pool = shared_from_this()](GpuBlock* own) {
    const Lock lock(pool->mutex_);
    pool->free_.emplace_back(own);
  });
}

// The smallest that is large enough, and not much larger.
std::unique_ptr<GpuBlock> GpuPool::find(size_t bytes) {
  constexpr size_t kMuch = 4;
  const Lock lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const size_t size = (*it)->bytes_;
    if (size >= bytes && size <= kMuch * bytes && (best == free_.end() || size < (*best)->bytes_)) best = it;
  }
  if (best == free_.end()) return nullptr;
  std::unique_ptr<GpuBlock> block = std::move(*best);
  free_.erase(best);
  return block;
}

// The driver waits for the whole GPU when memory is given back, and so for what waits for other ranks: that is waited
// for with the Watch first.
std::unique_ptr<GpuBlock> GpuPool::allocate(size_t bytes) {
  const CudaDriver& driver = gpu_->driver();
  const Gpu::Current current(*gpu_);
  CudaAddress address = 0;
  int code = driver.MemAlloc(&address, bytes);
  if (CudaDriver::is_out_of_memory(code)) {
    gpu_->wait(*gpu_->record(gpu_->stream()), watch_);
    free_all();
    code = driver.MemAlloc(&address, bytes);
  }
  if (!CudaDriver::is_out_of_memory(code)) {
    driver.check(code, "cuMemAlloc");
    return std::unique_ptr<GpuBlock>(new GpuBlock(reinterpret_cast<char*>(address), bytes));
  }
  std::shared_ptr<char> memory = gpu_->pinned(bytes);
  std::unique_ptr<GpuBlock> block(new GpuBlock(memory.get(), bytes));
  block->in_host_memory_ = std::move(memory);
  return block;
}

// The driver waits until the GPU does not use it any more.
void GpuPool::free_all() {
  const Gpu::Current current(*gpu_);
  const Lock lock(mutex_);
  for (const auto& block : free_)
    if (!block->in_host_memory_) gpu_->driver().MemFree(reinterpret_cast<CudaAddress>(block->memory_));
  free_.clear();
}

}  // namespace ringtrain
