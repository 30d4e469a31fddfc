// Memory on the GPU in which a NcclGroup packs what is small. NCCL knows it ("registered"), so that it may send from it
// without copying, where the library can.
#pragma once

#include <cstddef>

#include "fabric/gpu_memory.h"
#include "fabric/nccl.h"
#include "fabric/watch.h"

namespace ringtrain {

// For who has the engine's turn.
class NcclBuffer {
 public:
  // All outlive this.
  NcclBuffer(const NcclComm& comm, GpuPool& pool, Watch& watch) : comm_(comm), pool_(pool), watch_(watch) {}
  ~NcclBuffer();

  // At least `bytes`, for what is put into the GPU's own stream from now on; what was there before may be gone.
  char* get(size_t bytes);

 private:
  bool allocate(size_t bytes);
  void free();

  const NcclComm& comm_;
  GpuPool& pool_;
  Watch& watch_;
  void* memory_ = nullptr;        // of ncclMemAlloc
  void* registration_ = nullptr;  // null where NCCL did not want to
  GpuBlockPtr block_;             // where the library has no ncclMemAlloc, or no memory
  size_t bytes_ = 0;
};

}  // namespace ringtrain
