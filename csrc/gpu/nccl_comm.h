// Ranks that NCCL connects on their GPUs.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/call_thread.h"
#include "base/wait.h"
#include "gpu/gpu.h"
#include "gpu/nccl.h"

namespace ringtrain {

// Calls NCCL on a thread of its own. Any call may wait for the other ranks on the host: when it connects them, which it
// does when it sees fit, and with some of its algorithms always. Requires Engine::turn_; the caller keeps its Watch.
class NcclCaller {
 public:
  // `watch` outlives all calls of run().
  NcclCaller(const NcclLibrary& library, GpuPtr gpu, Watch& watch)
      : library_(library), gpu_(std::move(gpu)), watch_(watch) {}

  // Throws failure, naming the call, unless it says that all is well. It owns all that it uses: where the Watch throws,
  // it goes on alone. `comm`: what it is about; null where that is still to be made.
  void run(const char* name, NcclHandle comm, std::function<int()> call);
  // The name of a call that is still running; null for none.
  NcclHandle busy_with() const { return thread_.is_busy() ? comm_ : nullptr; }

  const NcclLibrary& library() const { return library_; }
  const GpuPtr& gpu() const { return gpu_; }

 private:
  const NcclLibrary& library_;
  const GpuPtr gpu_;
  Watch& watch_;
  NcclHandle comm_ = nullptr;  // of the last call
  CallThread thread_;
};

// Requires Engine::turn_.
class NcclComm {
 public:
  // For make(); one rank's, which the others are told.
  static NcclId new_id(NcclCaller& caller);
  // All ranks at the same time.
  static std::unique_ptr<NcclComm> make(std::shared_ptr<NcclCaller> caller, const NcclId& id, int rank, int size);
  // All ranks of this one at the same time; those of equal color come together, in the order of their keys. Null for
  // kNoColor.
  static constexpr int kNoColor = -1;
  std::unique_ptr<NcclComm> split(int color, int key, int rank, int size) const;
  // Ends what is under way if it has not been closed.
  ~NcclComm();

  int rank() const { return rank_; }
  int size() const { return size_; }
  NcclCaller& caller() const { return *caller_; }
  const NcclLibrary& library() const { return caller_->library(); }
  const GpuPtr& gpu() const { return caller_->gpu(); }
  NcclHandle handle() const { return handle_; }  // null when it has been ended

  // Memory in which NCCL may work without copying if it does so on all ranks; until it is forgotten, or this ends. Null
  // where NCCL makes no use of it, nothing where it refuses to know it.
  std::optional<void*> register_buffer(void* memory, size_t bytes);
  void deregister(void* registration);  // does nothing when this has been ended

  // Throws peer_lost when NCCL has found that something went wrong between the ranks.
  void require_well() const;
  // Takes leave. All ranks at the same time, and none has work under way.
  void close();
  // Ends what is under way; the GPU goes on with what comes after it. In bounded time. All at once: NCCL waits for the
  // whole GPU when it frees what one of them has, and so for the work of the others.
  static void abort(const std::vector<NcclComm*>& comms);

 private:
  NcclComm(std::shared_ptr<NcclCaller> caller, NcclHandle handle, int rank, int size)
      : caller_(std::move(caller)), handle_(handle), rank_(rank), size_(size) {}

  const std::shared_ptr<NcclCaller> caller_;
  NcclHandle handle_;
  const int rank_, size_;
};

}  // namespace ringtrain
