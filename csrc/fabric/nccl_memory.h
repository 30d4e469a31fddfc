// Memory on the GPU for the user's arrays in which NCCL sends and receives without copying ("user-buffer
// registration"): ncclMemAlloc makes it, and every communicator is told of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "fabric/nccl.h"

namespace ringtrain {

// Any thread, but for what is said to be for who has the engine's turn. Shared with the user's arrays.
class NcclMemory : public std::enable_shared_from_this<NcclMemory> {
 public:
  static std::shared_ptr<NcclMemory> of(const NcclLibrary& library, GpuPtr gpu) {
    return std::shared_ptr<NcclMemory>(new NcclMemory(library, std::move(gpu)));
  }
  ~NcclMemory();

  // At least `bytes`, not initialised; null where NCCL cannot make it, or does not want to. What was given back is used
  // again when the whole GPU has done all that it has, since nobody knows in which streams it was used; where that
  // takes long, there is new memory instead.
  std::shared_ptr<char> allocate(size_t bytes);

  // Whether `bytes` from there on are part of it. NCCL may only work there if it does so on all ranks.
  bool holds(const void* memory, size_t bytes);

  // For who has the turn: tells a communicator of what it does not know yet, and whether there was something.
  bool introduce_to(NcclComm& comm);

 private:
  struct Block {
    char* data;
    size_t bytes;
    bool is_free;
  };

  NcclMemory(const NcclLibrary& library, GpuPtr gpu) : library_(library), gpu_(std::move(gpu)) {}
  char* take_free(size_t bytes);
  bool is_soon_idle() const;
  char* make(size_t bytes);
  void give_back(const char* data);

  const NcclLibrary& library_;
  const GpuPtr gpu_;
  std::atomic<size_t> made_{0};  // changes under mutex_
  std::mutex mutex_;
  std::vector<Block> blocks_;  // in the order in which they were made; guarded by mutex_
};

}  // namespace ringtrain
