#include "runtime/gpu_tensors.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "collectives/group.h"

namespace ringtrain {

void GpuBacklog::add(GpuEventPtr done, const std::string& title, uint64_t commands) {
  constexpr size_t kMany = 64;
  if (pending_.size() >= kMany) look();
  pending_.push_back({std::move(done), title, commands, now_s()});
  commands_ += commands;
}

// A stream takes 1,020 copies and kernels (CUDA 13 on an H200), and an operation may add hundreds.
void GpuBacklog::make_room(const Gpu& gpu, Watch& watch) {
  constexpr uint64_t kMany = 400;
  if (commands_ > kMany) look();
  while (commands_ > kMany) {
    gpu.wait(*pending_.front().done, watch);
    look();
  }
}

void GpuBacklog::look() {
  while (!pending_.empty() && pending_.front().done->has_come()) {
    commands_ -= pending_.front().commands;
    pending_.pop_front();
    has_warned_ = false;
    if (!pending_.empty()) pending_.front().since_s = now_s();  // it waited for the one before
  }
  if (pending_.empty()) return;
  const double waited_s = now_s() - pending_.front().since_s;
  if (limits_.stall_shutdown_s > 0 && waited_s > limits_.stall_shutdown_s)
    throw Error(ErrorKind::stalled, text(waited_s));
  if (limits_.stall_warning_s == 0 || waited_s < limits_.stall_warning_s || has_warned_) return;
  has_warned_ = true;
  warn(text(waited_s));
}

void GpuBacklog::fail(const Error& reason) {
  for (const Pending& pending : pending_)
    if (!pending.done->is_over()) pending.done->set_error(reason);
  pending_.clear();
  commands_ = 0;
}

std::string GpuBacklog::text(double waited_s) const {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.0f", waited_s);
  return pending_.front().title + " has been on the GPU for " + seconds +
         " s: all ranks have begun it, but one of them, or something that was put into its stream before, does not go "
         "on";
}

GpuTensors::GpuTensors(GpuPtr gpu, Arena* arena, ProcessSets& sets, GpuBacklog& backlog, Watch& watch)
    : gpu_(std::move(gpu)),
      sets_(sets),
      backlog_(backlog),
      watch_(watch),
      pool_(GpuPool::of(gpu_, watch)),
      relay_(gpu_, arena, watch),
      alone_(std::make_unique<StagedGroup>(std::make_shared<SelfGroup>(), relay_, false)) {}

// The driver waits for the GPU when memory is given back. Where that would be for ever, since what an operation waits
// for never ends, the memory stays.
std::shared_ptr<GpuTensors> GpuTensors::of(GpuPtr gpu, Arena* arena, ProcessSets& sets, GpuBacklog& backlog,
                                           Watch& watch) {
  return {new GpuTensors(std::move(gpu), arena, sets, backlog, watch), [](GpuTensors* own) {
            if (own->is_soon_idle()) delete own;
          }};
}

bool GpuTensors::is_soon_idle() const try {
  constexpr double kLongest_s = 1;
  const GpuEventPtr own = gpu_->record(gpu_->stream()), uploads = gpu_->record(gpu_->upload_stream());
  return Waiter::comes_true([&] { return own->is_over() && uploads->is_over(); }, kLongest_s);
} catch (const Error&) {
  return true;  // the GPU has failed, and does nothing any more
}

// Of what was submitted from one stream the last is enough: the rest comes before it. Each thread has its own
// default stream.
void GpuTensors::let_wait_for(const std::vector<SubmissionPtr>& submissions) {
  backlog_.make_room(*gpu_, watch_);
  commands_before_ = gpu_->commands();
  const auto of_each_thread = reinterpret_cast<CudaStream>(2);  // CU_STREAM_PER_THREAD
  std::map<CudaStream, std::pair<uint64_t, GpuEventPtr>> last;
  for (const SubmissionPtr& submission : submissions) {
    if (!submission) continue;
    for (auto& [stream, event] : submission->ready) {
      if (stream == of_each_thread) {
        event->let_wait(gpu_->stream());
        continue;
      }
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
  std::vector<Piece> on_host;
  char* next = pinned(bytes);
  for (const Piece& piece : pieces) {
    copy(next, piece.source, piece.count * element);
    on_host.push_back({next, next, piece.count});
    next += piece.count * element;
  }
  gpu_->wait(*gpu_->record(gpu_->stream()), watch_);
  work(sets_.group(process_set), on_host);
  for (size_t i = 0; i < pieces.size(); ++i)
    copy(pieces[i].destination, on_host[i].destination, pieces[i].count * element);
}

// Earlier work in the stream may still use it; later work follows that.
char* GpuTensors::pinned(size_t bytes) {
  if (on_host_ && bytes <= on_host_bytes_) return on_host_.get();
  gpu_->wait(*gpu_->record(gpu_->stream()), watch_);
  on_host_.reset();
  on_host_ = gpu_->pinned(std::max<size_t>(bytes, 1));
  on_host_bytes_ = bytes;
  return on_host_.get();
}

GpuEventPtr GpuTensors::done(const std::string& title) {
  zeros_.reset();
  GpuEventPtr done = gpu_->record(gpu_->stream());
  backlog_.add(done, title, gpu_->commands() - commands_before_);
  return done;
}

}  // namespace ringtrain
