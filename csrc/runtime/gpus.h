// GPUs in this world: this rank's own, what the ranks know of each other's, and the Group of each process set on them.
// Nothing of CUDA is touched before the first array on a GPU comes.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/choose_gpu.h"
#include "collectives/nccl_group.h"
#include "fabric/nccl.h"
#include "runtime/fabric.h"
#include "runtime/gpu_backlog.h"
#include "runtime/gpu_tensors.h"
#include "runtime/process_sets.h"
#include "runtime/world.h"

namespace ringtrain {

class Gpus {
 public:
  // All outlive this.
  Gpus(const World& world, const Options& options, const Tuning& tuning, Fabric& fabric, ProcessSets& sets);
  ~Gpus();

  // Any thread. This rank's GPU, which is that of its first array: one for each rank. Throws invalid for an array on
  // another one, and failure where there is no driver.
  GpuPtr use(int ordinal);
  // Any thread. Memory for the user's arrays on this GPU in which NCCL works without copying; null where it cannot.
  std::shared_ptr<char> allocate(int ordinal, size_t bytes);
  // Any thread. Whether it is part of such memory.
  bool is_known_to_nccl(const void* memory, size_t bytes);

  // For who has the turn, from here on. All ranks of the world call it before each operation on GPUs; the first of a
  // process set makes its Group. Why there is none: "" if there is one.
  const std::string& open(int process_set);
  void close(int process_set);
  // Of one that this rank belongs to; "gpu" before its Group is made.
  const char* name_of_group(int process_set) const;
  // Of a process set with a Group that this rank belongs to.
  GpuTensors& tensors() { return *tensors_; }

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
  // Until all that was put into its streams is done, where this rank has a GPU.
  void finish_work();
  void warn_of_sharing() const;
  void warn_of_staging(const std::string& reason, const Placement& placement);
  void allow_sharing() const;

  // These make the Group of a process set; ranks outside it help.
  void make_nccl(int process_set, const Placement& placement);
  void make_hierarchy(int process_set, const Placement& placement);
  void make_staged(int process_set, const Placement& placement);
  // All ranks of the world call it.
  bool all_agree(bool is_well);

  // Who connects with whom: ranks of equal color, in the order of their places.
  struct Seat {
    int color = NcclComm::kNoColor;
    int place = 0, size = 0;
  };
  // All ranks of the world call it. Null for who has no color.
  std::unique_ptr<NcclGroup> connect(int process_set, const Seat& seat);
  NcclId agree_on_id(const Seat& seat);
  std::unique_ptr<Group> make_cross(int process_set, const Placement& placement, const Seat& seat);
  std::shared_ptr<NcclMemory> nccl_memory();

  const World& world_;
  const Options& options_;
  const Tuning& tuning_;
  Fabric& fabric_;
  ProcessSets& sets_;
  Watchful watch_;

  std::mutex mutex_;
  // Guarded by mutex_, and constant once they are there.
  GpuPtr gpu_;
  std::shared_ptr<NcclMemory> memory_;

  bool has_met_ = false;
  std::vector<GpuFacts> facts_;          // of every rank, once they have met
  const NcclLibrary* nccl_ = nullptr;    // null where there is none
  std::unique_ptr<GpuTensors> tensors_;  // null where there is no GPU
  std::map<int, std::string> troubles_;  // by process set
  // By process set. Shared with its Groups, which work with them, while this ends them.
  std::map<int, std::vector<std::shared_ptr<NcclComm>>> communicators_;
  std::shared_ptr<NcclComm> of_world_;  // all ranks; null where NCCL does not connect them all
  GpuBacklog backlog_;
  double next_look_s_ = 0;
  bool has_given_up_ = false;
  bool has_warned_of_staging_ = false;
};

}  // namespace ringtrain
