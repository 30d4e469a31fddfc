// NCCL, whichever copy there is, through the few functions that ringtrain calls. Nothing is compiled against an nccl.h.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/dynlib.h"
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
  // The functions below are looked up in it, in this order.
  const DynamicLibrary library_;
  int (*const GetVersion)(int*) = library_.find("ncclGetVersion");
  const std::string path_ = DynamicLibrary::path_of(GetVersion);
  const int version_ = checked_version();

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
  int (*GetUniqueId)(NcclId*) = library_.find("ncclGetUniqueId");
  const char* (*GetErrorString)(int) = library_.find("ncclGetErrorString");
  const char* (*GetLastError)(NcclHandle) = library_.find("ncclGetLastError");
  int (*CommInitRankConfig)(NcclHandle*, int, NcclId, int, NcclConfig*) = library_.find("ncclCommInitRankConfig");
  int (*CommSplit)(NcclHandle, int, int, NcclHandle*, NcclConfig*) = library_.find("ncclCommSplit");
  int (*CommDestroy)(NcclHandle) = library_.find("ncclCommDestroy");
  int (*CommAbort)(NcclHandle) = library_.find("ncclCommAbort");
  int (*CommGetAsyncError)(NcclHandle, int*) = library_.find("ncclCommGetAsyncError");
  int (*AllReduce)(const void*, void*, size_t, int, int, NcclHandle, CudaStream) = library_.find("ncclAllReduce");
  int (*Reduce_)(const void*, void*, size_t, int, int, int, NcclHandle, CudaStream) = library_.find("ncclReduce");
  int (*ReduceScatter)(const void*, void*, size_t, int, int, NcclHandle, CudaStream) = library_.find("ncclReduceScatter");
  int (*AllGather)(const void*, void*, size_t, int, NcclHandle, CudaStream) = library_.find("ncclAllGather");
  int (*Broadcast)(const void*, void*, size_t, int, int, NcclHandle, CudaStream) = library_.find("ncclBroadcast");
  int (*Send)(const void*, size_t, int, int, NcclHandle, CudaStream) = library_.find("ncclSend");
  int (*Recv)(void*, size_t, int, int, NcclHandle, CudaStream) = library_.find("ncclRecv");
  int (*GroupStart)() = library_.find("ncclGroupStart");
  int (*GroupEnd)() = library_.find("ncclGroupEnd");
  int (*RedOpCreatePreMulSum)(int*, void*, int, int, NcclHandle) = library_.find("ncclRedOpCreatePreMulSum");
  int (*RedOpDestroy)(int, NcclHandle) = library_.find("ncclRedOpDestroy");
  int (*MemAlloc)(void**, size_t) = library_.find_optional("ncclMemAlloc");  // null before 2.19, as those below
  int (*MemFree)(void*) = library_.find_optional("ncclMemFree");
  int (*CommRegister)(NcclHandle, void*, size_t, void**) = library_.find_optional("ncclCommRegister");
  int (*CommDeregister)(NcclHandle, void*) = library_.find_optional("ncclCommDeregister");
  int (*CommRevoke)(NcclHandle, int) = library_.find_optional("ncclCommRevoke");  // null before 2.29
  // clang-format on

 private:
  explicit NcclLibrary(const std::string& path) : library_(path) {}
  int checked_version() const;
};

}  // namespace ringtrain
