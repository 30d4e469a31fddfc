#include "runtime/resources.h"

#include <utility>

namespace ringtrain {

Resources::SharedArena Resources::arena() const {
  const Lock lock(mutex_);
  return arena_;
}

void Resources::set_arena(SharedArena arena) {
  const Lock lock(mutex_);
  std::swap(arena_, arena);  // the old one goes when the lock is free again
}

std::string Resources::findings() const {
  const Lock lock(mutex_);
  return findings_;
}

void Resources::set_findings(std::string findings) {
  const Lock lock(mutex_);
  findings_ = std::move(findings);
}

GpuPtr Resources::gpu(int ordinal) {
  const Lock lock(mutex_);
  GpuPtr gpu = gpu_.lock();
  if (gpu && gpu->ordinal() == ordinal) return gpu;
  gpu = Gpu::open(ordinal);
  gpu_ = gpu;
  nccl_memory_.reset();
  return gpu;
}

std::shared_ptr<NcclMemory> Resources::nccl_memory(const NcclLibrary& library, const GpuPtr& gpu) {
  const Lock lock(mutex_);
  std::shared_ptr<NcclMemory> memory = nccl_memory_.lock();
  if (!memory) nccl_memory_ = memory = NcclMemory::of(library, gpu);
  return memory;
}

}  // namespace ringtrain
