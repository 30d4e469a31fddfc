// The allreduce in place of one tensor in host memory that comes again in every step: all that is known of it before is
// made once and shared by its submissions.
#pragma once

#include <memory>

#include "runtime/engine.h"

namespace ringtrain {

// One thread at a time. Outlives engines: each submission goes to the current one.
class Prepared {
 public:
  // `request` lacks the tensor, and has a name of the user.
  Prepared(Request request, TensorSpec spec);

  const TensorSpec& spec() const { return request_->operation.tensors.front(); }
  // As SubmissionBuilder::submit, for the tensor at this address. Throws not_initialized.
  std::shared_ptr<Handle> submit(void* address, Engine::Caller caller);

 private:
  std::shared_ptr<Request> request_;
};

}  // namespace ringtrain
