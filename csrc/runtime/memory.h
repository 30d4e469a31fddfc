// Where the tensors of an operation are, as the Executor works there: with the Group that reaches the other ranks from
// this memory, and with what little it does to memory itself.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "collectives/group.h"
#include "record/handle.h"
#include "runtime/process_sets.h"

namespace ringtrain {

// Requires Engine::turn_.
class Memory {
 public:
  virtual ~Memory() = default;

  virtual Group& group(int process_set) = 0;

  virtual void copy(void* destination, const void* source, size_t bytes) = 0;
  // destination[i] = source[i] * factor, as kernels/reduce.h has it.
  virtual void scale(DType dtype, double factor, void* destination, const void* source, size_t count) = 0;
  // For one operation.
  virtual char* zeros(size_t bytes) = 0;
  // For a result. Throws failure.
  virtual OwnedTensor allocate(const TensorSpec& spec) = 0;

  // Runs work that needs host memory: it gets the Group there, and pieces with the values of these, whose destinations
  // will have what it leaves.
  using Work = std::function<void(Group&, const std::vector<Piece>&)>;
  virtual void on_host(int process_set, DType dtype, const std::vector<Piece>& pieces, const Work& work) = 0;

  // When all of the operation is done; null for at once.
  virtual GpuEventPtr done(const std::string& title) = 0;
};

class HostMemory final : public Memory {
 public:
  // `sets` outlives this.
  explicit HostMemory(ProcessSets& sets) : sets_(sets) {}

  Group& group(int process_set) override { return sets_.group(process_set); }
  void copy(void* destination, const void* source, size_t bytes) override;
  void scale(DType dtype, double factor, void* destination, const void* source, size_t count) override;
  char* zeros(size_t bytes) override;
  OwnedTensor allocate(const TensorSpec& spec) override;
  void on_host(int process_set, DType, const std::vector<Piece>& pieces, const Work& work) override {
    work(group(process_set), pieces);
  }
  GpuEventPtr done(const std::string&) override { return nullptr; }

 private:
  ProcessSets& sets_;
  Scratch zeros_;
};

}  // namespace ringtrain
