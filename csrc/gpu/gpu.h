// One GPU as this rank uses it: ringtrain's own streams on it, the order between them and those of the user, and memory
// that both the GPU and the host can reach.
//
// Work on a GPU is put into streams and done later. An event is a point in a stream; another stream can be told to wait
// for it, which does not keep the host. All streams and memory belong to the context that CUDA's libraries share
// ("primary"); a thread must have made it its current one before it calls the driver, hence Current.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/wait.h"
#include "gpu/cuda.h"

namespace ringtrain {

class Gpu;

// A point in a stream. Any thread.
class GpuEvent {
 public:
  ~GpuEvent();
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  // Whether the GPU has come there, or never will; yes in a forked child, which cannot know. Never throws: who ends
  // what has failed asks it, too.
  bool is_over() const;
  // Whether the GPU has nothing to do any more of what comes before it, also where it has an error. Never throws.
  bool is_past() const;
  // Whether the GPU has come there. Throws failure when it has failed.
  bool has_come() const;
  // Work that is put into the stream from now on waits for it. Throws its error, if it has one.
  void let_wait(CudaStream stream) const;
  // The GPU has not come there and never will. Once.
  void set_error(const Error& error);
  const Gpu& gpu() const { return *gpu_; }

 private:
  friend class Gpu;
  GpuEvent(std::shared_ptr<const Gpu> gpu, CudaEvent event) : gpu_(std::move(gpu)), event_(event) {}
  int query() const;

  const std::shared_ptr<const Gpu> gpu_;
  const CudaEvent event_;
  std::optional<Error> error_;  // written once, before has_error_
  std::atomic<bool> has_error_{false};
  // The default stream, which is never another one, waits already: the gradients of a step share their event.
  mutable std::atomic<bool> is_awaited_by_default_{false};
};
using GpuEventPtr = std::shared_ptr<GpuEvent>;

// Any thread, but for what is said to require Engine::turn_. Shared with the user's arrays.
class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  // Throws failure when the driver cannot be used, or has no such device.
  static std::shared_ptr<Gpu> open(int ordinal);
  ~Gpu();

  // As long as it lives, its thread works on this GPU, whatever other threads capture into CUDA graphs: of the calls
  // made here, none becomes part of a graph. Where that fails, so does the next call of the driver.
  class Current {
   public:
    explicit Current(const Gpu& gpu) : Current(&gpu) {}
    explicit Current(const Gpu* gpu);  // null for none
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaDriver* driver_ = nullptr;  // null for none
    bool is_pushed_ = false;              // it was not current before
    int captures_before_ = 0;             // what this thread might do during captures
  };

  const CudaDriver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  const std::string& uuid() const { return uuid_; }

  // Throws invalid for memory that is not on this GPU: better than what the GPU would do about it.
  void require_owns(const void* memory) const;
  // Where `stream` is now. Throws invalid while it is being captured into a graph.
  GpuEventPtr record_of_user(CudaStream stream) const;
  GpuEventPtr record(CudaStream stream) const;
  // A copy in a stream of the user's, and where that ends.
  GpuEventPtr copy_for_user(void* destination, const void* source, size_t bytes, CudaStream stream) const;

  // Requires Engine::turn_, from here on. Work that others wait for, and copies to the GPU beside it.
  CudaStream stream() const { return stream_; }
  CudaStream upload_stream() const { return upload_stream_; }

  // How many copies and kernels there have been in these streams, roughly. Events do not count: they take no room.
  uint64_t commands() const { return commands_.load(std::memory_order_relaxed); }
  void note_commands(uint64_t count) const { commands_.fetch_add(count, std::memory_order_relaxed); }

  // Between any two places that the GPU can reach, in the order of the stream.
  void copy(void* destination, const void* source, size_t bytes, CudaStream stream) const;
  void clear(void* memory, size_t bytes, CudaStream stream) const;
  // Keeps the host until the GPU has come there. Throws failure when it has failed.
  void wait(const GpuEvent& event, Watch& watch) const;

  // Memory of the host that the GPU can reach. Throws failure.
  std::shared_ptr<char> pinned(size_t bytes) const;
  // The same of what there is already; null where the driver refuses.
  std::shared_ptr<char> pin(std::shared_ptr<char> memory, size_t bytes) const;

 private:
  friend class GpuEvent;
  explicit Gpu(int ordinal);
  GpuEventPtr record_here(CudaStream stream) const;  // where the GPU is current
  void give_back(CudaEvent event) const;

  const OwnProcess process_;
  const CudaDriver& driver_;
  const int ordinal_;
  const std::string uuid_;
  CudaContext context_ = nullptr;  // never released: others may still use it
  CudaStream stream_ = nullptr, upload_stream_ = nullptr;

  mutable std::atomic<uint64_t> commands_{0};
  mutable std::mutex mutex_;
  mutable std::vector<CudaEvent> free_events_;  // guarded by mutex_
};
using GpuPtr = std::shared_ptr<const Gpu>;

}  // namespace ringtrain
