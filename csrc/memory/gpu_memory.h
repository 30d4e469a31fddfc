// Memory on a GPU that operations work in or leave results in. Taking it from the driver may stop the whole GPU, so it
// is kept and used again.
#pragma once

#include <cstddef>
#include <list>
#include <memory>

#include "base/fork.h"
#include "base/thread_annotations.h"
#include "gpu/gpu.h"

namespace ringtrain {

class GpuPool;

// Goes back to its pool when nobody holds it any more. Any thread.
class GpuBlock {
 public:
  GpuBlock(const GpuBlock&) = delete;
  GpuBlock& operator=(const GpuBlock&) = delete;

  char* data() const { return memory_; }
  // It is in use until the GPU comes there: nobody else gets it before.
  void is_used_until(GpuEventPtr event);

 private:
  friend class GpuPool;
  // Null where the GPU is through with it; only once.
  GpuEventPtr end_of_use();
  GpuBlock(char* memory, size_t bytes) : memory_(memory), bytes_(bytes) {}

  char* const memory_;
  const size_t bytes_;
  Mutex mutex_;
  GpuEventPtr used_until_ GUARDED_BY(mutex_);
  std::shared_ptr<char> in_host_memory_;  // where the GPU had no room
};
using GpuBlockPtr = std::shared_ptr<GpuBlock>;

// Any thread, but for take().
class GpuPool : public std::enable_shared_from_this<GpuPool> {
 public:
  // `watch` is asked in take() alone, and outlives who calls that.
  static std::shared_ptr<GpuPool> of(GpuPtr gpu, Watch& watch) {
    return owned_here(new GpuPool(std::move(gpu), watch));
  }
  ~GpuPool();

  // Requires Engine::turn_. At least `bytes`, not initialised, for what is put into the GPU's own stream from
  // now on. Where the GPU has no room, memory of the host that it can reach: one rank must not fail where the others go
  // on. Throws failure when there is none of that either.
  GpuBlockPtr take(size_t bytes);

 private:
  GpuPool(GpuPtr gpu, Watch& watch) : gpu_(std::move(gpu)), watch_(watch) {}
  std::unique_ptr<GpuBlock> find(size_t bytes);
  std::unique_ptr<GpuBlock> allocate(size_t bytes);
  void free_all();

  const GpuPtr gpu_;
  Watch& watch_;
  Mutex mutex_;
  std::list<std::unique_ptr<GpuBlock>> free_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
