// The memory: of the GPUs, pinned and registered. Device memory is on the host, on pages of its own.
//
// Any thread. The address of freed device memory is never given again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "cuda.h"

namespace gpu_double {

enum class MemoryKind { device, pinned, registered };

struct Block {
  uintptr_t begin;
  size_t bytes;
  MemoryKind kind;
  CUdevice device;  // of the context in which it was allocated
  char* view;       // where the double itself finds it: elsewhere if device memory is guarded, see settings.h
};

class Memory {
 public:
  // All refuse with the driver's code.
  uintptr_t allocate(CUdevice device, size_t bytes);
  void free(uintptr_t begin);
  uintptr_t allocate_pinned(CUdevice device, size_t bytes);
  void free_pinned(uintptr_t begin);
  void register_host(CUdevice device, uintptr_t begin, size_t bytes);
  void unregister_host(uintptr_t begin);
  void free_all_of(CUdevice device);

  // Where the double finds device or pinned memory; null if not all of the range is in one block.
  char* view(uintptr_t begin, size_t bytes) const;
  // False if there is no block at that address.
  bool find(uintptr_t address, Block& found) const;
  bool touches_device_memory(uintptr_t begin, size_t bytes) const;

  size_t used_bytes(CUdevice device) const;
  size_t count_device_blocks() const;
  size_t pinned_bytes() const;
  size_t most_pinned_bytes() const;

 private:
  using Blocks = std::map<uintptr_t, Block>;

  Block take(uintptr_t begin, MemoryKind kind, int refusal);
  void add(const Block& block);
  const Block* block_at(uintptr_t address) const;
  size_t sum_of_used_bytes(CUdevice device) const;

  mutable std::mutex mutex_;
  // guarded by mutex_
  Blocks blocks_;
  size_t pinned_bytes_ = 0;
  size_t most_pinned_bytes_ = 0;
};

Memory& memory();

}  // namespace gpu_double
