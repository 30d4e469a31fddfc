// One operation that a caller has asked for, until it is done and a while longer.
#pragma once

#include <cstddef>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "coordination/operation.h"
#include "record/handle.h"

namespace ringtrain {

// A list that allocates nothing while it has one element, as most operations have one tensor.
template <typename Value>
class Few {
 public:
  void push_back(Value value) {
    if (size_ == 0)
      first_ = value;
    else
      others_.push_back(value);
    ++size_;
  }
  size_t size() const { return size_; }
  const Value& operator[](size_t place) const { return place == 0 ? first_ : others_[place - 1]; }

 private:
  size_t size_ = 0;
  Value first_{};
  std::vector<Value> others_;
};

// When it came how far, on the clock of base/clock.h; 0: not yet.
struct Progress {
  double submitted_s = 0;
  double announced_s = 0;  // told to the other ranks
  double agreed_s = 0;     // all ranks are ready
  double begun_s = 0;
  double ended_s = 0;
  const char* group = "";  // who carries it out
  ErrorKind error = ErrorKind::none;
};

struct Submission {
  std::shared_ptr<Request> request;
  Few<void*> inputs;            // one for each tensor of the request
  Few<void*> outputs;           // as many, or none where the operation allocates them; may be the inputs
  Few<size_t> output_bytes;     // how long they are, where that is not what the inputs are
  std::vector<int64_t> splits;  // alltoall: for each tensor the rows for each rank
  double weight = 1;            // of this rank, where the operation is weighted
  bool waits_for_name = false;  // while it is in flight, where another one would be refused
  bool is_awaited = false;      // the submitting thread does nothing else until it is done
  bool is_unnamed = false;      // by the user
  std::thread::id submitter;    // of what is unnamed
  // On a GPU: where the user's streams were when it was submitted, by stream.
  std::vector<std::pair<CudaStream, GpuEventPtr>> ready;
  std::shared_ptr<Handle> handle = std::make_shared<Handle>();
  uint64_t number = 0;        // among the operations of this rank, from 1
  Progress progress;          // guarded by the Inbox
  bool is_under_way = false;  // a thread carries it out; guarded by the Inbox

  const Operation& operation() const { return request->operation; }
  // Whether the caller wants the result in memory of its own, which has this size.
  bool has_room_for(size_t tensor, const TensorSpec& spec) const {
    return outputs.size() > tensor && output_bytes.size() > tensor && output_bytes[tensor] == spec.bytes();
  }
  // To change it, before it is announced: of what is shared with other submissions a copy.
  Request& own_request() {
    if (request.use_count() > 1) request = std::make_shared<Request>(*request);
    return *request;
  }
  Operation& own_operation() { return own_request().operation; }
};

using SubmissionPtr = std::shared_ptr<Submission>;

}  // namespace ringtrain
