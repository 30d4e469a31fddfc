// A communicator: this rank's end of a segment, and the work on streams that was submitted to it.
//
// Any thread may call it. Its work runs on one stream at a time, in the order of the launches, as NCCL's does.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "context.h"
#include "nccl.h"
#include "reduce.h"
#include "segment.h"

namespace gpu_double {

// Of a PreMulSum.
using Scalar = std::array<char, 8>;

// Thrown in the work of a communicator that was aborted.
struct Aborted {};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // The ranks meet at this place; `patience` may end the wait. Refuses two ranks on one GPU as NCCL does.
  Communicator(Context& of, const Place& place, int its_rank, int its_size, const Patience& patience);

  // Null for a rank without a color.
  std::shared_ptr<Communicator> split(int color, int key);
  // Behind the work of all these streams, which go on after it. `streams` is not empty.
  void launch(const std::vector<std::shared_ptr<Stream>>& streams, std::function<void(Communicator&)> work);
  // Returns when all ranks have called it.
  void shake_hands();
  void finish();
  // Ends what runs and what would run, and what waits in a split or a handshake. Returns in bounded time.
  void revoke();
  // The same, and waits for the GPU, as NCCL frees memory of it then. The process ends where a handshake is under way,
  // since NCCL frees what that uses.
  void abort();

  // On all ranks.
  void fail_everywhere(int code);
  int error() const;

  // All ranks have called it; only in work. Throws Aborted.
  void next_round();
  // Which half of what is written for a round; only in work.
  int half() const { return static_cast<int>(round_ & 1); }
  // Throws Aborted.
  void require_not_aborted() const;

  ncclRedOp_t add_op(Type type, const Scalar& scalar);
  bool find_op(ncclRedOp_t op, Type& type, Scalar& scalar) const;
  void remove_op(ncclRedOp_t op);
  void* add_registration();
  void remove_registration(void* handle);
  size_t count_registrations() const;

  Context& context;
  const int rank;
  const int size;
  const std::shared_ptr<Segment> segment;

 private:
  struct Op {
    Type type;
    Scalar scalar;
  };

  void refuse_shared_gpus() const;
  void run(const std::function<void(Communicator&)>& work);

  uint32_t round_ = 0;  // the stream at work only
  std::atomic<bool> is_aborted_{false};
  std::mutex splitting_;
  uint32_t splits_ = 0;  // guarded by splitting_
  std::mutex shaking_;
  uint32_t handshakes_ = 0;  // guarded by shaking_
  std::atomic<bool> is_shaking_{false};

  mutable std::mutex mutex_;
  std::condition_variable has_stopped_;
  // guarded by mutex_
  Point last_;
  int running_ = 0;
  std::map<ncclRedOp_t, Op> ops_;
  ncclRedOp_t next_op_ = nccl::kFirstOwnOp;
  std::set<void*> registrations_;
  uintptr_t next_registration_ = 0x540000000000;
};

// Gives up when it was asked for longer than the environment allows.
Patience patience_of_join();

}  // namespace gpu_double
