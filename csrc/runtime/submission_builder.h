// Makes submissions of plain data: names, addresses, shapes, dtypes and streams. Every language that submits does it
// here.
#pragma once

#include <memory>
#include <vector>

#include "runtime/engine.h"

namespace ringtrain {

struct TensorView {
  static constexpr int kHost = -1;

  void* address = nullptr;
  TensorSpec spec;
  int device = kHost;           // the number of the GPU
  CudaStream stream = nullptr;  // on a GPU: in which its values are made
};

// Where a tensor is. Its dtype, its shape and its device are known.
struct TensorPlace {
  void* address = nullptr;
  CudaStream stream = nullptr;  // on a GPU: in which its values are made
};

// Throws invalid for a place that cannot hold a tensor.
void require_memory(const void* address, const TensorSpec& spec);

class SubmissionBuilder {
 public:
  // Any thread, as all else. `request` still lacks the tensors. Throws not_initialized.
  explicit SubmissionBuilder(Request request);

  // All tensors of an operation are on the same device. Throws invalid for memory that cannot be what it is said to be.
  // On a GPU the operation waits for what is in the view's stream now.
  void add_input(TensorView view);
  void add_output(const TensorView& view);
  void add_in_place(TensorView view);
  // alltoall: for each tensor the rows for each rank.
  void set_splits(std::vector<int64_t> splits) { submission_->splits = std::move(splits); }

  // Of an average: how much the tensors of this rank count. With a negative or infinite one all ranks fail.
  void set_weight(double weight);
  void set_title(std::string title) {
    submission_->request->title = std::make_shared<const std::string>(std::move(title));
  }
  // On a GPU, with a tensor: that in which the values of the first one are made.
  CudaStream stream() const { return submission_->ready.empty() ? nullptr : submission_->ready.front().first; }
  void let_wait_for_name() { submission_->waits_for_name = true; }

  // Once. As Engine::submit.
  std::shared_ptr<Handle> submit(Engine::Caller caller) { return engine_->submit(std::move(submission_), caller); }

 private:
  const std::shared_ptr<Engine> engine_;
  SubmissionPtr submission_;
};

// The allreduce or broadcast in place of one tensor that comes again in every step: all that is known of it before is
// made once and shared by its submissions.
//
// One thread at a time. Outlives engines: each submission goes to the current one.
class Prepared {
 public:
  // The first such tensor; its place does not count. `request` lacks the tensor. Without a name each submission gets
  // one of its own. `waits_for_name`: see Submission. A request that is weighted needs set_weight().
  Prepared(Request request, TensorView tensor, bool waits_for_name);

  const TensorSpec& spec() const { return request_->operation.tensors.front(); }
  int device() const { return device_; }
  bool is_on_gpu() const { return device_ != TensorView::kHost; }
  int process_set() const { return request_->operation.process_set; }
  int priority() const { return request_->priority; }
  bool is_weighted() const { return request_->operation.is_weighted; }
  // Of the submissions from now on. As SubmissionBuilder::set_weight.
  void set_weight(double weight) { weight_ = weight; }
  // As SubmissionBuilder::submit, for the tensor in this place on the same device. Throws not_initialized, and on a GPU
  // what SubmissionBuilder throws.
  std::shared_ptr<Handle> submit(const TensorPlace& place, Engine::Caller caller);
  // The same, with title and site of its own.
  std::shared_ptr<Handle> submit(const TensorPlace& place, Engine::Caller caller, std::string title,
                                 std::shared_ptr<const std::string> site);

 private:
  std::shared_ptr<Handle> submit(std::shared_ptr<Request> request, const TensorPlace& place, Engine::Caller caller);

  std::shared_ptr<Request> request_;
  const int device_;
  double weight_ = 1;
  bool waits_for_name_;
};

}  // namespace ringtrain
