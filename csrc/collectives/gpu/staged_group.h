// A Group of host memory doing its work for memory on a GPU: where NCCL cannot go, the values pass through the host a
// part at a time.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/wait.h"
#include "collectives/group.h"
#include "collectives/network/library.h"
#include "gpu/gpu.h"
#include "memory/arena.h"

namespace ringtrain {

// A GPU's memory in the hands of the host, a part at a time (a staging pipeline): while one part is worked on in the
// host's memory, those behind it are on their way there and those before it on their way back.
//
// Requires Engine::turn_. Goes when the GPU is done with it.
class Relay {
 public:
  static constexpr size_t kSlots = 3, kMostBytes = 4 << 20;

  // `arena`: where the parts are in the meantime, or null for memory of this rank alone. All outlive this.
  Relay(GpuPtr gpu, Arena* arena, Watch& watch) : gpu_(std::move(gpu)), arena_(arena), watch_(watch) {}

  const Gpu& gpu() const { return *gpu_; }
  // Takes the memory now, instead of with the first run. Whether it is in the Arena.
  bool prepare();

  // Bytes for the parts of so many: large enough for the bus, small enough for all to be at work most of the time.
  static size_t part_bytes(size_t total_bytes);

  // For k from 0 to parts - 1: load(k, slot) puts copies to the slot into gpu.stream(), work(k, slot) is called when
  // they are there, and store(k, slot) puts copies from it into gpu.upload_stream(). Work put into gpu.stream()
  // afterwards follows all of it. A slot has kMostBytes.
  template <typename Load, typename Work, typename Store>
  void run(size_t parts, Load load, Work work, Store store) {
    constexpr size_t kAhead = kSlots - 1;
    prepare();
    gpu_->record(gpu_->stream())->let_wait(gpu_->upload_stream());
    try {
      for (size_t k = 0; k < parts + kAhead; ++k) {
        if (k < parts) {
          if (stored_[k % kSlots]) stored_[k % kSlots]->let_wait(gpu_->stream());
          load(k, slot(k));
          loaded_[k % kSlots] = gpu_->record(gpu_->stream());
        }
        if (k < kAhead) continue;
        const size_t ready = k - kAhead;
        if (ready >= parts) continue;
        gpu_->wait(*loaded_[ready % kSlots], watch_);
        work(ready, slot(ready));
        store(ready, slot(ready));
        stored_[ready % kSlots] = gpu_->record(gpu_->upload_stream());
      }
    } catch (...) {
      if (is_in_arena_) keep_for_ever(memory_);  // another rank may still write to it
      throw;
    }
    for (const GpuEventPtr& stored : stored_)
      if (stored) stored->let_wait(gpu_->stream());
  }

 private:
  char* slot(size_t k) const { return memory_.get() + k % kSlots * kMostBytes; }

  const GpuPtr gpu_;
  Arena* const arena_;
  Watch& watch_;
  std::shared_ptr<char> memory_;
  bool is_in_arena_ = false;
  std::array<GpuEventPtr, kSlots> loaded_, stored_;
};

class StagedGroup : public Group {
 public:
  // `host` does the work. `use_arena`, the same on all ranks: the relay's memory is in the Arena everywhere. `relay`
  // outlives this.
  StagedGroup(std::shared_ptr<Group> host, Relay& relay, bool use_arena)
      : Group(host->rank(), host->size()),
        host_(std::move(host)),
        relay_(relay),
        gpu_(relay.gpu()),
        use_arena_(use_arena) {}
  const char* name() const override { return "staged"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;
  void reduce_scatter(const Reduction& reduction, const void* source, void* destination, const Counts& counts) override;
  void allgather(const void* source, void* destination, const Counts& bytes) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void alltoall(const void* source, const Counts& send_bytes, void* destination, const Counts& receive_bytes) override;
  void barrier() override { host_->barrier(); }

 protected:
  const Gpu& gpu() const { return gpu_; }

 private:
  // Between the GPU and the host: counts[r] bytes for each rank, laid end to end here and `offset` further on there.
  void load(char* slot, const void* source, const Counts& all, const Counts& part, size_t offset) const;
  void store(void* destination, const char* slot, const Counts& all, const Counts& part, size_t offset) const;

  const std::shared_ptr<Group> host_;
  Relay& relay_;
  const Gpu& gpu_;
  const bool use_arena_;
  int64_t parts_ = 0;  // what the ranks agree on in alltoall()
};

// Sums between GPUs by an MPI that takes their addresses itself ("CUDA-aware"): no copies through host memory.
//
// MPI knows nothing of streams, so the host waits for what is in the GPU's own one before it calls MPI. Factors, 16-bit
// floats and operations that only move data pass through the host.
class CudaMpiGroup final : public StagedGroup {
 public:
  // All ranks at the same time. `host` and `relay` as for StagedGroup.
  CudaMpiGroup(Endpoint peers, std::shared_ptr<Group> host, Relay& relay)
      : StagedGroup(std::move(host), relay, false), peers_(std::move(peers)), library_(peers_) {}
  const char* name() const override { return "cuda-aware mpi"; }

  void allreduce(const Reduction& reduction, const std::vector<Piece>& pieces) override;

 private:
  Endpoint peers_;
  Library library_;
};

}  // namespace ringtrain
