#include "runtime/submission_builder.h"

#include <utility>

namespace ringtrain {

namespace {

// The operation waits for what is in the tensor's stream now.
void note_stream(Engine& engine, Submission& submission, const TensorSpec& spec, const TensorPlace& place, int device) {
  const GpuPtr gpu = engine.gpu(device);
  if (spec.count() > 0) gpu->require_owns(place.address);
  for (const auto& [stream, event] : submission.ready)
    if (stream == place.stream) return;
  submission.ready.emplace_back(place.stream, gpu->record_of_user(place.stream));
}

}  // namespace

void require_memory(const void* address, const TensorSpec& spec) {
  if (address == nullptr && spec.count() > 0)
    throw invalid(
        "the elements of this array are in no memory of its own (its address is 0): send the array that it "
        "wraps, or a copy in plain memory");
}

SubmissionBuilder::SubmissionBuilder(Request request)
    : engine_(require_engine()), submission_(std::make_shared<Submission>()) {
  submission_->request = std::make_shared<Request>(std::move(request));
}

void SubmissionBuilder::add_input(TensorView view) {
  require_memory(view.address, view.spec);
  Operation& operation = submission_->request->operation;
  operation.is_on_gpu = view.device != TensorView::kHost;
  if (operation.is_on_gpu) note_stream(*engine_, *submission_, view.spec, {view.address, view.stream}, view.device);
  submission_->inputs.push_back(view.address);
  operation.tensors.push_back(std::move(view.spec));
}

void SubmissionBuilder::add_output(const TensorView& view) {
  require_memory(view.address, view.spec);
  submission_->outputs.push_back(view.address);
  const OpKind kind = submission_->operation().kind;
  if (kind == OpKind::allgather || kind == OpKind::alltoall || kind == OpKind::reducescatter)
    submission_->output_bytes.push_back(view.spec.bytes());
}

void SubmissionBuilder::add_in_place(TensorView view) {
  submission_->outputs.push_back(view.address);
  add_input(std::move(view));
}

void SubmissionBuilder::set_weight(double weight) {
  submission_->weight = weight;
  submission_->request->operation.is_weighted = true;
}

Prepared::Prepared(Request request, TensorView tensor, bool waits_for_name)
    : request_(std::make_shared<Request>(std::move(request))), device_(tensor.device), waits_for_name_(waits_for_name) {
  request_->operation.is_on_gpu = is_on_gpu();
  request_->operation.tensors.push_back(std::move(tensor.spec));
}

std::shared_ptr<Handle> Prepared::submit(const TensorPlace& place, Engine::Caller caller) {
  return submit(request_, place, caller);
}

std::shared_ptr<Handle> Prepared::submit(const TensorPlace& place, Engine::Caller caller, std::string title,
                                         std::shared_ptr<const std::string> site) {
  auto request = std::make_shared<Request>(*request_);
  request->title = std::make_shared<const std::string>(std::move(title));
  request->site = std::move(site);
  return submit(std::move(request), place, caller);
}

std::shared_ptr<Handle> Prepared::submit(std::shared_ptr<Request> request, const TensorPlace& place,
                                         Engine::Caller caller) {
  require_memory(place.address, spec());
  const std::shared_ptr<Engine> engine = require_engine();
  auto submission = std::make_shared<Submission>();
  submission->request = std::move(request);
  submission->inputs.push_back(place.address);
  submission->outputs.push_back(place.address);
  submission->weight = weight_;
  submission->waits_for_name = waits_for_name_;
  if (is_on_gpu()) note_stream(*engine, *submission, spec(), place, device_);
  std::shared_ptr<Handle> handle = engine->submit(submission, caller);
  const bool has_name = !request_->operation.name.empty();  // else the submission has a name that is not for the next
  if (has_name) request_ = submission->request;  // another one where the memory is registered now, or is no more
  return handle;
}

}  // namespace ringtrain
