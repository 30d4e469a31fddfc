#include "runtime/prepared.h"

#include <utility>

#include "runtime/current_engine.h"
#include "runtime/submission_builder.h"

namespace ringtrain {

Prepared::Prepared(Request request, TensorSpec spec) : request_(std::make_shared<Request>(std::move(request))) {
  request_->operation.tensors.push_back(std::move(spec));
}

std::shared_ptr<Handle> Prepared::submit(void* address, Engine::Caller caller) {
  require_memory(address, spec());
  auto submission = std::make_shared<Submission>();
  submission->request = request_;
  submission->inputs.push_back(address);
  submission->outputs.push_back(address);
  std::shared_ptr<Handle> handle = require_engine()->submit(submission, caller);
  request_ = submission->request;  // another one where the memory is registered now, or is no more
  return handle;
}

}  // namespace ringtrain
