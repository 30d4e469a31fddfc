// Memory on a GPU that operations work in or leave results in. Taking it from the driver may stop the whole GPU, so it
// is kept and used again.
#pragma once

#include <atomic>
#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/thread_annotations.h"
#include "gpu/gpu.h"
#include "gpu/nccl.h"

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

// Memory on the GPU for the user's arrays in which NCCL sends and receives without copying ("user-buffer
// registration"): ncclMemAlloc makes it, and every communicator registers it.
//
// It comes in slabs, since ncclMemAlloc takes at least a page of the GPU, 2 MB, for each.
//
// Any thread. Shared with the user's arrays.
class NcclMemory : public std::enable_shared_from_this<NcclMemory> {
 public:
  static std::shared_ptr<NcclMemory> of(const NcclLibrary& library, GpuPtr gpu) {
    return owned_here(new NcclMemory(library, std::move(gpu)));
  }
  ~NcclMemory();

  // At least `bytes`, not initialised; null where NCCL cannot make it, or refuses. Memory that was given back
  // is used again when ringtrain's streams and the default one have done what they had then. Another stream of the
  // user's, as with other pools of memory, must have done its work there before.
  std::shared_ptr<char> allocate(size_t bytes);

  // Whether `bytes` from there on are part of it. NCCL may only work there if it does so on all ranks.
  bool holds(const void* memory, size_t bytes);

  // All but the first `count` slabs, in the order in which they were made.
  std::vector<std::pair<char*, size_t>> slabs_after(size_t count);

  // The slab of that number is registered by the communicator with that key, until it deregisters all of them.
  void note_registered(size_t slab, int key);
  void note_deregistered(int key);
  // Whether `bytes` from there on are part of a slab that it has registered.
  bool is_registered(const void* memory, size_t bytes, int key);

 private:
  using Points = std::vector<GpuEventPtr>;
  // From its offset in the slab up to the next one's.
  struct Piece {
    size_t bytes;
    bool is_taken;
    std::optional<Points> after;  // free when the GPU has come there; null where that could not be said yet
  };
  struct Slab {
    char* data;
    size_t bytes;
    std::map<size_t, Piece> pieces;
    std::set<int> registered_by = {};  // keys of communicators

    bool holds(const char* first, size_t count) const { return first >= data && first + count <= data + bytes; }
  };

  NcclMemory(const NcclLibrary& library, GpuPtr gpu) : library_(library), gpu_(std::move(gpu)) {}
  // Null while a stream is captured into a graph.
  std::optional<Points> points_now() const;
  // Null where there is none.
  char* take(size_t bytes);
  static char* take_from(Slab& slab, size_t bytes);
  static bool is_free(Piece& piece);
  bool make_slab(size_t bytes);
  // For what was given back while a stream was captured.
  void set_missing_points();
  void give_back(const char* data);
  Piece* piece_at(const char* data);  // that begins there; under mutex_

  const NcclLibrary& library_;
  const GpuPtr gpu_;
  std::atomic<size_t> made_{0};  // slabs; changes under mutex_
  std::mutex mutex_;             // the engine waits for it: no call that may wait for the GPU is made under it
  std::vector<Slab> slabs_;      // guarded by mutex_
};

}  // namespace ringtrain
