// Resources that outlive an Engine. An Engine is made for one generation of the job and ends with it; the arrays that
// the user has made in ringtrain's memory go on, and should be reduced where they are in the next generation, too.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/thread_annotations.h"
#include "gpu/nccl.h"
#include "memory/arena.h"
#include "memory/gpu_memory.h"

namespace ringtrain {

// One in a process. Any thread.
class Resources {
 public:
  // The Arena of the ranks of a node, and what the ranks know it by.
  struct SharedArena {
    std::shared_ptr<Arena> arena;  // null where there is none
    std::string token;             // of the generation in which it was made; the same on all ranks
    int member = 0, size = 0;      // this rank's place on the node then, and how many ranks it had
  };
  SharedArena arena() const {
    const Lock lock(mutex_);
    return arena_;
  }
  void set_arena(SharedArena arena) {
    const Lock lock(mutex_);
    std::swap(arena_, arena);  // the old one goes when the lock is free again
  }

  // The result of Autotune in this process, in its words; empty while it has none.
  std::string findings() const {
    const Lock lock(mutex_);
    return findings_;
  }
  void set_findings(std::string findings) {
    const Lock lock(mutex_);
    findings_ = std::move(findings);
  }

  // The GPU with its streams, and NCCL's memory on it: the same as before while somebody, such as an array of the
  // user's, still uses them. Throws failure where there is none.
  GpuPtr gpu(int ordinal) {
    const Lock lock(mutex_);
    GpuPtr gpu = gpu_.lock();
    if (gpu && gpu->ordinal() == ordinal) return gpu;
    gpu_ = gpu = Gpu::open(ordinal);
    nccl_memory_.reset();
    return gpu;
  }
  std::shared_ptr<NcclMemory> nccl_memory(const NcclLibrary& library, const GpuPtr& gpu) {
    const Lock lock(mutex_);
    std::shared_ptr<NcclMemory> memory = nccl_memory_.lock();
    if (!memory) nccl_memory_ = memory = NcclMemory::of(library, gpu);
    return memory;
  }

 private:
  mutable Mutex mutex_;
  SharedArena arena_ GUARDED_BY(mutex_);
  std::string findings_ GUARDED_BY(mutex_);
  std::weak_ptr<const Gpu> gpu_ GUARDED_BY(mutex_);
  std::weak_ptr<NcclMemory> nccl_memory_ GUARDED_BY(mutex_);  // on that GPU
};

}  // namespace ringtrain
