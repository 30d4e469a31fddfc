// NCCL, whichever copy there is, through the few functions that ringtrain calls. Nothing is compiled against an nccl.h.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "fabric/gpu.h"
#include "fabric/watch.h"

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

  // Throws failure, naming the call, unless the code says that all is well.
  void check(int code, const char* call) const;
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
  // clang-format on

 private:
  explicit NcclLibrary(const std::string& path);

  int version_ = 0;
  std::string path_;
};

// Ranks that NCCL connects on their GPUs. Its calls that wait for other ranks run on a thread of their own while this
// one keeps its Watch. For who has the engine's turn.
class NcclComm {
 public:
  // All ranks at the same time.
  static std::unique_ptr<NcclComm> make(const NcclLibrary& library, GpuPtr gpu, const NcclId& id, int rank, int size,
                                        Watch& watch);
  // All ranks of this one at the same time; those of equal color come together, in the order of their keys. Null for
  // kNoColor.
  static constexpr int kNoColor = -1;
  std::unique_ptr<NcclComm> split(int color, int key, int rank, int size, Watch& watch) const;
  // Ends what is under way if it has not been closed.
  ~NcclComm();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const NcclLibrary& library() const { return library_; }
  const GpuPtr& gpu() const { return gpu_; }
  NcclHandle handle() const { return handle_; }

  // Memory of the user's in which NCCL may work without copying, in the order in which it was made, and how many pieces
  // of it there have been; see NcclMemory.
  void get_to_know(void* memory, size_t bytes);
  size_t known_memory() const { return registrations_.size(); }

  // Throws peer_lost when NCCL has found that something went wrong between the ranks.
  void require_well() const;
  // Takes leave. All ranks at the same time, and none has work under way.
  void close(Watch& watch);
  // Ends what is under way; the GPU goes on with what comes after it. In bounded time. All at once: NCCL waits for the
  // whole GPU when it frees what one of them has, and so for the work of the others.
  static void abort(const std::vector<NcclComm*>& comms);

 private:
  NcclComm(const NcclLibrary& library, GpuPtr gpu, NcclHandle handle, int rank, int size)
      : library_(library), gpu_(std::move(gpu)), handle_(handle), rank_(rank), size_(size) {}

  const NcclLibrary& library_;
  const GpuPtr gpu_;
  NcclHandle handle_;
  const int rank_, size_;
  std::vector<void*> registrations_;  // null where NCCL makes no use of it
};

}  // namespace ringtrain
