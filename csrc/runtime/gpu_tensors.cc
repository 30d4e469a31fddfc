#include "runtime/gpu_tensors.h"

#include <utility>

#include "collectives/self_group.h"
#include "collectives/staged_group.h"

namespace ringtrain {

GpuTensors::GpuTensors(GpuPtr gpu, Arena* arena, ProcessSets& sets, GpuBacklog& backlog, Watch& watch)
    : gpu_(std::move(gpu)),
      sets_(sets),
      backlog_(backlog),
      watch_(watch),
      pool_(GpuPool::of(gpu_)),
      relay_(gpu_, arena, watch),
      alone_(std::make_unique<StagedGroup>(std::make_shared<SelfGroup>(), relay_, false)) {}

// Of what was submitted from one stream the last is enough: the rest comes before it.
void GpuTensors::let_wait_for(const std::vector<SubmissionPtr>& submissions) {
  std::map<CudaStream, std::pair<uint64_t, GpuEventPtr>> last;
  for (const SubmissionPtr& submission : submissions) {
    if (!submission) continue;
    for (auto& [stream, event] : submission->ready) {
      auto& [number, latest] = last[stream];
      if (submission->number < number) continue;
      number = submission->number;
      latest = std::move(event);
    }
    submission->ready.clear();
  }
  for (const auto& [stream, entry] : last) entry.second->let_wait(gpu_->stream());
}

void GpuTensors::copy(void* destination, const void* source, size_t bytes) {
  gpu_->copy(destination, source, bytes, gpu_->stream());
}

void GpuTensors::scale(DType dtype, double factor, void* destination, const void* source, size_t count) {
  alone_->allreduce({dtype, Reduce::sum, factor}, {{source, destination, count}});
}

char* GpuTensors::zeros(size_t bytes) {
  if (bytes == 0) return nullptr;
  zeros_ = pool_->take(bytes);
  gpu_->clear(zeros_->data(), bytes, gpu_->stream());
  return zeros_->data();
}

OwnedTensor GpuTensors::allocate(const TensorSpec& spec) {
  const GpuBlockPtr block = pool_->take(spec.bytes());
  return {spec, std::shared_ptr<char>(block, block->data()), block};
}

void GpuTensors::on_host(int process_set, DType dtype, const std::vector<Piece>& pieces, const Work& work) {
  const size_t element = size_of(dtype);
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.count * element;
  const std::shared_ptr<char> host = gpu_->pinned(bytes + 1);
  std::vector<Piece> on_host;
  char* next = host.get();
  for (const Piece& piece : pieces) {
    copy(next, piece.source, piece.count * element);
    on_host.push_back({next, next, piece.count});
    next += piece.count * element;
  }
  gpu_->wait(*gpu_->record(gpu_->stream()), watch_);
  work(sets_.group(process_set), on_host);
  for (size_t i = 0; i < pieces.size(); ++i)
    copy(pieces[i].destination, on_host[i].destination, pieces[i].count * element);
  gpu_->wait(*gpu_->record(gpu_->stream()), watch_);
}

GpuEventPtr GpuTensors::done(const std::string& title) {
  zeros_.reset();
  GpuEventPtr done = gpu_->record(gpu_->stream());
  backlog_.add(done, title);
  return done;
}

}  // namespace ringtrain
