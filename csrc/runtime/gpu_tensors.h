// Tensors on this rank's GPU. All work goes into the GPU's own stream; nothing here waits for it, but for what passes
// through host memory.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/gpu/staged_group.h"
#include "gpu/gpu.h"
#include "memory/gpu_memory.h"
#include "record/submission.h"
#include "runtime/memory.h"

namespace ringtrain {

// Work that was put into the GPU's stream and is not done. No thread waits for it, so this watches it: work that waits
// for a rank that is gone never ends by itself.
//
// Requires Engine::turn_.
class GpuBacklog {
 public:
  // After how many seconds it warns, and throws StalledError; 0: never.
  struct Limits {
    double stall_warning_s, stall_shutdown_s;
  };
  explicit GpuBacklog(const Limits& limits) : limits_(limits) {}

  // `title`: of the operation, for messages. `commands`: that it has put into the stream.
  void add(GpuEventPtr done, const std::string& title, uint64_t commands);
  // Before an operation: waits where so much is there already that the driver might keep the next call waiting, in
  // which nobody would look after the other ranks.
  void make_room(const Gpu& gpu, Watch& watch);
  bool is_empty() const { return pending_.empty(); }
  // Forgets what is done. Throws when the rest takes too long.
  void look();
  // The rest will never be done; who asks for it gets the reason.
  void fail(const Error& reason);

 private:
  struct Pending {
    GpuEventPtr done;
    std::string title;
    uint64_t commands;
    double since_s;
  };
  std::string text(double waited_s) const;

  const Limits limits_;
  std::deque<Pending> pending_;  // in the order of the stream
  uint64_t commands_ = 0;        // of all of them
  bool has_warned_ = false;      // of the first one
};

class GpuTensors final : public Memory {
 public:
  // The groups of the process sets are added as they are made. All outlive what is done with this.
  static std::shared_ptr<GpuTensors> of(GpuPtr gpu, Arena* arena, ProcessSets& sets, GpuBacklog& backlog, Watch& watch);

  const GpuPtr& gpu() const { return gpu_; }
  const std::shared_ptr<GpuPool>& pool() const { return pool_; }
  Relay& relay() { return relay_; }
  void set_group(int process_set, std::unique_ptr<Group> group) { groups_[process_set] = std::move(group); }
  void drop_group(int process_set) { groups_.erase(process_set); }
  bool has_group(int process_set) const { return groups_.count(process_set) != 0; }

  // The next operation reads what the users' streams have written.
  void let_wait_for(const std::vector<SubmissionPtr>& submissions);

  Group& group(int process_set) override { return *groups_.at(process_set); }
  void copy(void* destination, const void* source, size_t bytes) override;
  void scale(DType dtype, double factor, void* destination, const void* source, size_t count) override;
  char* zeros(size_t bytes) override;
  OwnedTensor allocate(const TensorSpec& spec) override;
  void on_host(int process_set, DType dtype, const std::vector<Piece>& pieces, const Work& work) override;
  GpuEventPtr done(const std::string& title) override;

 private:
  GpuTensors(GpuPtr gpu, Arena* arena, ProcessSets& sets, GpuBacklog& backlog, Watch& watch);
  // Whether all that was put into the GPU's own streams is over, now or in a moment. Never throws.
  bool is_soon_idle() const;
  char* pinned(size_t bytes);

  const GpuPtr gpu_;
  ProcessSets& sets_;
  GpuBacklog& backlog_;
  Watch& watch_;
  const std::shared_ptr<GpuPool> pool_;
  Relay relay_;
  std::unique_ptr<Group> alone_;   // scales
  GpuBlockPtr zeros_;              // of the operation under way
  std::shared_ptr<char> on_host_;  // what works in host memory; grows to the largest request and stays
  size_t on_host_bytes_ = 0;
  uint64_t commands_before_ = 0;  // the operation under way
  std::map<int, std::unique_ptr<Group>> groups_;
};

}  // namespace ringtrain
