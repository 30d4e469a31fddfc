// The completion of one submission.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/tensor.h"
#include "base/thread_annotations.h"
#include "base/wait.h"
#include "memory/gpu_memory.h"

namespace ringtrain {

// Memory that an operation allocated for its result, because its size was not known when it was submitted.
struct OwnedTensor {
  TensorSpec spec;
  std::shared_ptr<char> memory;  // shared with the array that is made of it for the user
  GpuBlockPtr block;             // the same memory, where it is the GPU's
};

struct Result {
  std::vector<OwnedTensor> tensors;      // of allgather, alltoall, reducescatter; else empty
  std::vector<int64_t> received_splits;  // alltoall: for each tensor the rows that came from each rank
  int64_t number = 0;                    // join: the last rank; add_process_set: the id
  GpuEventPtr done;                      // when the GPU has it; null for what is there already
};

// Any thread may look, wait and, when it is done, read. On a GPU "done" means that all work is put into its stream: a
// stream that waits for `result().done` finds the values.
class Handle {
 public:
  bool is_done() const { return done_.reached(1); }
  // Whether it is done now; waits for at most `timeout_s`.
  bool wait(double timeout_s);

  // Whether it is done, and the GPU has done it, too.
  bool is_over() const { return is_done() && (!result_.done || result_.done->is_over()); }

  // Whether nobody reads or writes its arrays any more: it is done, the GPU has nothing of it left to do, and what it
  // was carried out with when it failed, which MPI may still work with, is gone.
  bool is_memory_free() const;

  // Only once it is done. Throws the error with which the operation ended, if it did.
  const Result& result() const;

  // Any thread. Nobody waits for it any more: one that has not begun need not begin.
  void give_up() { is_given_up_.store(true, std::memory_order_relaxed); }
  bool is_given_up() const { return is_given_up_.load(std::memory_order_relaxed); }

  // Any thread. Calls it once when this is done: at once if it is already, else on the thread that finishes it. No lock
  // of ringtrain's is held then but the turn, and the GIL is not. So it may submit, but not wait for a Handle; and
  // it must not throw.
  void on_done(std::function<void()> callback);

  // Of the operation: whose lane finishes it; kMessage where none does. Set before anybody waits.
  static constexpr int kMessage = -1;
  int process_set() const { return process_set_; }
  void set_process_set(int id) { process_set_ = id; }

  // Once.
  void finish(Result result) REQUIRES(turn);
  void fail(ErrorKind kind, const std::string& message) REQUIRES(turn);
  // Before that, where it fails in the middle: its arrays are in use as long as `loan` lives.
  void lend_until_gone(std::weak_ptr<const void> loan) { loan_ = std::move(loan); }

 private:
  void publish();

  int process_set_ = 0;
  // Written before done_, read after it.
  Result result_;
  std::weak_ptr<const void> loan_;
  ErrorKind error_ = ErrorKind::none;
  std::string message_;
  Flag done_;
  std::atomic<bool> is_given_up_{false};

  Mutex mutex_;
  std::vector<std::function<void()>> callbacks_ GUARDED_BY(mutex_);  // none once they were called
};

}  // namespace ringtrain
