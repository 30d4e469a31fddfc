// GPUs in this world: this rank's own, what the ranks know of each other's, and the Group of each process set on them.
// Nothing of CUDA is touched before the first array on a GPU comes.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/gpu/choose_gpu.h"
#include "gpu/nccl.h"
#include "runtime/fabric.h"
#include "runtime/gpu_backlog.h"
#include "runtime/gpu_groups.h"
#include "runtime/gpu_tensors.h"
#include "runtime/process_sets.h"
#include "runtime/world.h"

namespace ringtrain {

class Gpus {
 public:
  // All outlive this.
  Gpus(const World& world, const Options& options, const Tuning& tuning, Fabric& fabric, ProcessSets& sets);

  // Any thread. This rank's GPU, which is that of its first array: one for each rank. Throws invalid for an array on
  // another one, and failure where there is no driver.
  GpuPtr use(int ordinal);
  // Any thread. Memory for the user's arrays on this GPU in which NCCL works without copying; null where it cannot.
  std::shared_ptr<char> allocate(int ordinal, size_t bytes);
  // Any thread. Whether it is part of such memory, and the communicator of the process set knows that.
  bool is_known_to_nccl(int process_set, const void* memory, size_t bytes);

  // Requires Engine::turn_, from here on. All ranks of the world call it before each operation on GPUs; the first of a
  // process set makes its Group. Why there is none: "" if there is one.
  const std::string& open(int process_set);
  void close(int process_set);
  // Of one that this rank belongs to; "gpu" before its Group is made.
  const char* name_of_group(int process_set) const;
  // Of a process set with a Group that this rank belongs to.
  const std::shared_ptr<GpuTensors>& tensors() { return tensors_; }

  // Throws when what was given to the GPU does not end. Cheap enough to be called often.
  void look();
  // Ends what is under way: nobody answers any more.
  void give_up(const Error& reason);
  // When all ranks leave: after all that is under way.
  void leave();

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

  void meet();
  GpuFacts own_facts();
  GpuPtr own_gpu();  // null before it is chosen
  int usual_ordinal() const;
  // For as long as it lives, where this rank has a GPU.
  Gpu::Current make_current() const;
  void warn_of_sharing() const;
  void warn_of_staging(const std::string& reason, const Placement& placement);
  void allow_sharing() const;

  std::shared_ptr<NcclMemory> nccl_memory();

  const World& world_;
  const Options& options_;
  Fabric& fabric_;
  ProcessSets& sets_;
  Watchful watch_;

  std::mutex mutex_;
  // Guarded by mutex_, and constant once they are there.
  GpuPtr gpu_;
  std::shared_ptr<NcclMemory> memory_;

  bool has_met_ = false;
  std::vector<GpuFacts> facts_;        // of every rank, once they have met
  const NcclLibrary* nccl_ = nullptr;  // null where there is none
  // Null where there is no GPU. Shared with requests of MPI that were left under way.
  std::shared_ptr<GpuTensors> tensors_;
  std::map<int, std::string> troubles_;  // by process set
  GpuGroups groups_;
  GpuBacklog backlog_;
  double next_look_s_ = 0;
  bool has_warned_of_staging_ = false;
};

}  // namespace ringtrain
