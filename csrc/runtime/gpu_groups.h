// Makes the Groups of process sets on GPUs: connects their ranks by NCCL where it is to be used, and ends that again.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "base/options.h"
#include "collectives/gpu/choose_gpu.h"
#include "collectives/gpu/nccl_group.h"
#include "gpu/nccl_comm.h"
#include "memory/gpu_memory.h"
#include "runtime/fabric.h"
#include "runtime/gpu_tensors.h"
#include "runtime/process_sets.h"

namespace ringtrain {

// Requires Engine::turn_, and that the GPU is current.
class GpuGroups {
 public:
  // All outlive this. `watch`: of all that waits.
  GpuGroups(const Options& options, const Tuning& tuning, Fabric& fabric, ProcessSets& sets, Watch& watch)
      : options_(options), tuning_(tuning), fabric_(fabric), sets_(sets), watch_(watch) {}

  // What this rank has; null where it has none. `tensors` gets the Groups, and outlives this.
  void set_up(GpuTensors* tensors, const NcclLibrary* nccl, std::shared_ptr<NcclMemory> memory);

  // All ranks of the world call these together; those outside the process set help.
  void make(GpuWay way, int process_set, const Placement& placement);
  void close(int process_set);

  // Throws peer_lost when NCCL has found that something went wrong between the ranks.
  void require_well() const;
  // Ends what NCCL has under way.
  void abort();

 private:
  // Who connects with whom: ranks of equal color, in the order of their places.
  struct Seat {
    int color = NcclComm::kNoColor;
    int place = 0, size = 0;
  };

  void make_nccl(int process_set, const Placement& placement);
  void make_hierarchy(int process_set, const Placement& placement);
  void make_staged(int process_set, const Placement& placement);
  // Null on a rank without a color.
  std::unique_ptr<NcclGroup> connect(int process_set, const Seat& seat);
  std::unique_ptr<Group> make_cross(int process_set, const Placement& placement, const Seat& seat);
  std::unique_ptr<Group> make_staged_group(int process_set, bool use_arena);
  NcclId agree_on_id(const Seat& seat);
  // Until all that was put into the GPU's stream is done, where this rank has a GPU.
  void finish_work();

  const Options& options_;
  const Tuning& tuning_;
  Fabric& fabric_;
  ProcessSets& sets_;
  Watch& watch_;
  GpuTensors* tensors_ = nullptr;
  std::shared_ptr<NcclCaller> nccl_;    // null where there is no NCCL
  std::shared_ptr<NcclMemory> memory_;  // of the user's arrays

  // By process set. Shared with its Groups, which work with them, while this ends them.
  std::map<int, std::vector<std::shared_ptr<NcclComm>>> communicators_;
  std::shared_ptr<NcclComm> of_world_;  // all ranks; null where NCCL does not connect them all
};

}  // namespace ringtrain
