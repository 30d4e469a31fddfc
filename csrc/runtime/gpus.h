// GPUs in this world: this rank's own, what the ranks know of each other's, and the Group of each process set on them.
// Nothing of CUDA is touched before the first array on a GPU comes.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/options.h"
#include "base/thread_annotations.h"
#include "collectives/gpu/choose_gpu.h"
#include "collectives/gpu/nccl_group.h"
#include "gpu/nccl.h"
#include "gpu/nccl_comm.h"
#include "memory/gpu_memory.h"
#include "runtime/fabric.h"
#include "runtime/gpu_tensors.h"
#include "runtime/process_sets.h"
#include "runtime/resources.h"

namespace ringtrain {

// Makes the Groups of process sets on GPUs: connects their ranks by NCCL where it is to be used, and ends that again.
//
// Requires Engine::turn_, and that the GPU is current.
class GpuGroups {
 public:
  // All outlive this. `watch`: of all that waits.
  GpuGroups(const Options& options, const Tuning& tuning, Fabric& fabric, ProcessSets& sets, Watch& watch)
      : options_(options), tuning_(tuning), fabric_(fabric), sets_(sets), watch_(watch) {}

  // The GPU of this rank; null where it has none. `tensors` gets the Groups, and outlives this.
  void set_up(GpuTensors* tensors, const NcclLibrary* nccl, std::shared_ptr<NcclMemory> memory);

  // All ranks of the world call these together; those outside the process set help.
  void make(GpuWay way, int process_set, const Placement& placement);
  void close(int process_set);

  // Throws peer_lost when NCCL has found that something went wrong between the ranks.
  void require_well() const;
  // Ends what NCCL has under way.
  void abort();

 private:
  // Ranks of equal color connect, in the order of their places.
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

class Gpus {
 public:
  // All outlive this.
  Gpus(const World& world, const Options& options, const Tuning& tuning, Resources& resources, Fabric& fabric,
       ProcessSets& sets);

  // Any thread. This rank's GPU, which is that of its first array: one for each rank. Throws invalid for an array on
  // another one, and failure where there is no driver.
  GpuPtr use(int ordinal);
  // Any thread. Memory for the user's arrays on this GPU in which NCCL works without copying; null where it cannot.
  std::shared_ptr<char> allocate(int ordinal, size_t bytes);
  // Any thread. Whether the memory was allocated here and is registered with the communicator of the process set.
  bool is_registered(int process_set, const void* memory, size_t bytes);

  // All ranks of the world call it before each operation on GPUs; the first of a
  // process set makes its Group. Why there is none: "" if there is one.
  const std::string& open(int process_set) REQUIRES(turn);
  void close(int process_set) REQUIRES(turn);
  // Of one that this rank belongs to; "gpu" before its Group is made.
  const char* name_of_group(int process_set) const REQUIRES(turn);
  // Of a process set with a Group that this rank belongs to.
  const std::shared_ptr<GpuTensors>& tensors() REQUIRES(turn) { return tensors_; }

  // Throws when what was given to the GPU does not end. Cheap enough to be called often.
  void look() REQUIRES(turn);
  // Ends what is under way: nobody answers any more.
  void abort(const Error& reason) REQUIRES(turn);
  // When all ranks leave: after all that is under way.
  void leave() REQUIRES(turn);

 private:
  // For all that waits for a GPU. Before it throws, it ends what NCCL has under way: memory that is given back on the
  // way out of there waits for the GPU, which may wait for a rank that is gone.
  class Watchful final : public Watch {
   public:
    explicit Watchful(Gpus& gpus) : gpus_(gpus) {}
    void check(double waited_s) override;
    double interval_s(double waited_s) const override { return gpus_.fabric_.watch().interval_s(waited_s); }

   private:
    Gpus& gpus_;
  };

  void meet() REQUIRES(turn);
  GpuFacts own_facts() REQUIRES(turn);
  GpuPtr own_gpu();  // null before it is chosen
  int usual_ordinal() const;
  // For as long as it lives, where this rank has a GPU.
  Gpu::Current make_current() const REQUIRES(turn);
  void warn_of_sharing() const REQUIRES(turn);
  void warn_of_staging(const std::string& reason, const Placement& placement) REQUIRES(turn);
  void allow_sharing() const REQUIRES(turn);

  std::shared_ptr<NcclMemory> nccl_memory();

  const World& world_;
  const Options& options_;
  Resources& resources_;
  Fabric& fabric_;
  ProcessSets& sets_;
  Watchful watch_;

  Mutex mutex_;
  // Constant once they are there.
  GpuPtr gpu_ GUARDED_BY(mutex_);
  std::shared_ptr<NcclMemory> memory_ GUARDED_BY(mutex_);

  bool has_met_ GUARDED_BY(turn) = false;
  std::vector<GpuFacts> facts_ GUARDED_BY(turn);        // of every rank, once they have met
  const NcclLibrary* nccl_ GUARDED_BY(turn) = nullptr;  // null where there is none
  // Null where there is no GPU. Shared with requests of MPI that were left under way.
  std::shared_ptr<GpuTensors> tensors_ GUARDED_BY(turn);
  std::map<int, std::string> troubles_ GUARDED_BY(turn);  // by process set
  GpuGroups groups_ GUARDED_BY(turn);
  GpuBacklog backlog_ GUARDED_BY(turn);
  double next_look_s_ GUARDED_BY(turn) = 0;
  bool has_warned_of_staging_ GUARDED_BY(turn) = false;
};

}  // namespace ringtrain
