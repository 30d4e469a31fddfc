// Memory on the GPU in which a NcclGroup packs what is small. NCCL knows it ("registered"), so that it may send from it
// without copying, where the library can.
#pragma once

#include <cstddef>

#include "gpu/nccl_comm.h"
#include "memory/gpu_memory.h"

namespace ringtrain {

// Requires Engine::turn_.
class NcclBuffer {
 public:
  // Both outlive this.
  NcclBuffer(NcclComm& comm, GpuPool& pool) : comm_(comm), pool_(pool) {}
  ~NcclBuffer();

  // Takes memory that NCCL knows; whether there is some. NCCL wants such memory on all ranks or on none, so a rank that
  // has some drops it where another has none.
  bool prepare();
  void drop();

  // At least `bytes`, for what is put into the GPU's own stream from now on; what was there before may be gone. Whether
  // NCCL knows it depends on the bytes alone.
  char* get(size_t bytes);

 private:
  NcclComm& comm_;
  GpuPool& pool_;
  void* memory_ = nullptr;  // of ncclMemAlloc
  void* registration_ = nullptr;
  GpuBlockPtr block_;  // where that is too small, or there is none
};

}  // namespace ringtrain
