// Tensors on this rank's GPU. All work goes into the GPU's own stream; nothing here waits for it, but for what passes
// through host memory.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/gpu/staged_group.h"
#include "memory/gpu_memory.h"
#include "record/submission.h"
#include "runtime/gpu_backlog.h"
#include "runtime/memory.h"

namespace ringtrain {

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
