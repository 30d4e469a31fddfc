// NCCL, whichever copy there is, through the few functions that ringtrain calls. Nothing is compiled against an nccl.h.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "gpu/cuda.h"

namespace ringtrain {

using NcclHandle = void*;  // ncclComm_t

// By which the ranks of a communicator find each other. As NCCL has it, since it is passed by value.
struct NcclId {
  char bytes[128] = {};
};

// ncclConfig_t as it was in its first version, 2.14: later libraries take it.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 1;
};

// Where a package has put a copy, and the major version of the CUDA for which it was built.
using NcclCandidate = std::pair<std::string, int>;

class NcclLibrary {
 public:
  // The copy that this process has loaded already (PyTorch's, say), else the first of `candidates` that can be opened
  // and is not built for a CUDA that the driver does not speak yet, else the one that the loader finds. Throws failure
  // when there is none, or an old one. Any thread.
  static const NcclLibrary& open(const std::vector<NcclCandidate>& candidates);

  int version() const { return version_; }  // 22703 for 2.27.3
  const std::string& path() const { return path_; }

  // "unhandled cuda error (why)". NCCL says why to the thread that has made the call, of a communicator or of none.
  std::string text(int code, NcclHandle comm = nullptr) const;

  // NCCL's number for it; less than 0 for what it does not have. Bools travel as bytes.
  static int type_of(DType dtype);
  static int operation_of(DType dtype, Reduce reduce);

  // clang-format off
  int (*GetVersion)(int*);
  int (*GetUniqueId)(NcclId*);
  const char* (*GetErrorString)(int);
  const char* (*GetLastError)(NcclHandle);
  int (*CommInitRankConfig)(NcclHandle*, int, NcclId, int, NcclConfig*);
  int (*CommSplit)(NcclHandle, int, int, NcclHandle*, NcclConfig*);
  int (*CommDestroy)(NcclHandle);
  int (*CommAbort)(NcclHandle);
  int (*CommGetAsyncError)(NcclHandle, int*);
  int (*AllReduce)(const void*, void*, size_t, int, int, NcclHandle, CudaStream);
  int (*Reduce_)(const void*, void*, size_t, int, int, int, NcclHandle, CudaStream);
  int (*ReduceScatter)(const void*, void*, size_t, int, int, NcclHandle, CudaStream);
  int (*AllGather)(const void*, void*, size_t, int, NcclHandle, CudaStream);
  int (*Broadcast)(const void*, void*, size_t, int, int, NcclHandle, CudaStream);
  int (*Send)(const void*, size_t, int, int, NcclHandle, CudaStream);
  int (*Recv)(void*, size_t, int, int, NcclHandle, CudaStream);
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*RedOpCreatePreMulSum)(int*, void*, int, int, NcclHandle);
  int (*RedOpDestroy)(int, NcclHandle);
  int (*MemAlloc)(void**, size_t);                            // null before 2.19, as those below
  int (*MemFree)(void*);
  int (*CommRegister)(NcclHandle, void*, size_t, void**);
  int (*CommDeregister)(NcclHandle, void*);
  int (*CommRevoke)(NcclHandle, int);                         // null before 2.29
  // clang-format on

 private:
  explicit NcclLibrary(const std::string& path);

  int version_ = 0;
  std::string path_;
};

}  // namespace ringtrain
