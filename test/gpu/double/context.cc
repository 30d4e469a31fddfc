#include "context.h"

#include <algorithm>
#include <utility>

#include "call.h"
#include "device.h"
#include "handles.h"

namespace gpu_double {
namespace {

constexpr int kRelaxed = 2;
thread_local std::vector<Context*> current;
thread_local int capture_mode = 0;

long number_of_this_thread() {
  static std::atomic<long> threads{0};
  thread_local const long number = ++threads;
  return number;
}

const std::vector<Context*>& contexts() {
  static const auto* const all = [] {
    auto* made = new std::vector<Context*>;
    for (CUdevice device = 0; device < device_count(); ++device) made->push_back(new Context(device));
    return made;
  }();
  return *all;
}

Handles<Stream>& streams() {
  static auto* const all = new Handles<Stream>(0x510000000000);
  return *all;
}

}  // namespace

void Context::retain() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++retained_;
}

bool Context::release() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (retained_ == 0) throw Refusal{result::kInvalidContext, "the context is not retained"};
    if (--retained_ > 0) return false;
  }
  synchronize();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : streams_) stream->close();
  streams_.clear();
  of_threads_.clear();
  legacy_.reset();
  return true;
}

bool Context::is_active() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return retained_ > 0;
}

std::shared_ptr<Stream> Context::add_stream(bool is_blocking, int priority) {
  streams_.push_back(std::make_shared<Stream>(*this, is_blocking, priority));
  return streams_.back();
}

std::shared_ptr<Stream> Context::make_stream(bool is_blocking, int priority) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return add_stream(is_blocking, priority);
}

std::shared_ptr<Stream> Context::legacy_stream() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (legacy_ == nullptr) legacy_ = add_stream(true, kLeastPriority);
  return legacy_;
}

std::shared_ptr<Stream> Context::stream_of_this_thread() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Stream>& stream = of_threads_[number_of_this_thread()];
  if (stream == nullptr) stream = add_stream(true, kLeastPriority);
  return stream;
}

std::vector<Point> Context::what_comes_first(const Stream& stream) const {
  std::vector<Point> points;
  const auto add = [&](const std::shared_ptr<Stream>& other) {
    const Point point{other, other->tail()};
    if (!point.is_reached()) points.push_back(point);
  };
  if (&stream == legacy_.get()) {
    for (const auto& other : streams_)
      if (other != legacy_ && other->is_blocking) add(other);
  } else if (stream.is_blocking && legacy_ != nullptr) {
    add(legacy_);
  }
  return points;
}

Point Context::enqueue(const std::shared_ptr<Stream>& stream, Stream::Work work) {
  require_not_capturing(*stream);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_over = [](const std::shared_ptr<Stream>& one) { return one->is_over(); };
  streams_.erase(std::remove_if(streams_.begin(), streams_.end(), is_over), streams_.end());
  const std::vector<Point> first = what_comes_first(*stream);
  if (first.empty()) return {stream, stream->enqueue(std::move(work))};
  return {stream, stream->enqueue([first, work = std::move(work)] {
            for (const Point& point : first) point.wait();
            work();
          })};
}

void Context::require_not_capturing(const Stream& stream) const {
  if (stream.is_capturing) throw Refusal{result::kStreamCaptureUnsupported, "the stream is capturing"};
  const std::lock_guard<std::mutex> lock(mutex_);
  if (&stream != legacy_.get()) return;
  for (const auto& other : streams_)
    if (other->is_blocking && other->is_capturing)
      throw Refusal{result::kStreamCaptureImplicit, "the legacy stream would wait for one that is capturing"};
}

void Context::require_safe() const {
  if (capture_mode == kRelaxed) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& stream : streams_)
    if (stream->is_capturing) throw Refusal{result::kStreamCaptureUnsupported, "another stream is capturing"};
}

void Context::synchronize() const {
  std::vector<Point> tails;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& stream : streams_) tails.push_back({stream, stream->tail()});
  }
  for (const Point& tail : tails) tail.wait();
}

Context& primary_context(CUdevice device) {
  require_device(device);
  return *contexts()[static_cast<size_t>(device)];
}

Context& context_of(CUcontext handle) {
  const auto found = std::find(contexts().begin(), contexts().end(), handle);
  if (found == contexts().end()) throw Refusal{result::kInvalidContext, "no context"};
  if (!(*found)->is_active()) throw Refusal{result::kContextIsDestroyed, "the context was released"};
  return **found;
}

Context* current_context_or_none() { return current.empty() ? nullptr : current.back(); }

Context& current_context() {
  require_initialized();
  if (current.empty()) throw Refusal{result::kInvalidContext, "this thread has no current context"};
  return context_of(current.back());
}

void push_current(Context& context) { current.push_back(&context); }

Context& pop_current() {
  if (current.empty()) throw Refusal{result::kInvalidContext, "this thread has no current context"};
  Context* const popped = current.back();
  current.pop_back();
  return *popped;
}

void set_current(Context* context) {
  if (!current.empty()) current.pop_back();
  if (context != nullptr) current.push_back(context);
}

int exchange_capture_mode(int mode) { return std::exchange(capture_mode, mode); }

CUstream open_stream(Context& context, bool is_blocking, int priority) {
  return streams().add(context.make_stream(is_blocking, priority));
}

void destroy_stream(CUstream handle) {
  const std::shared_ptr<Stream> stream = streams().remove(handle);
  if (stream == nullptr) throw Refusal{result::kInvalidHandle, "no stream"};
  stream->close();
}

void forget_streams_of(const Context& context) {
  streams().remove_if([&](const Stream& stream) { return &stream.context == &context; });
}

size_t count_streams() { return streams().count(); }

std::shared_ptr<Stream> stream_of(Context& context, CUstream handle) {
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number <= 1) return context.legacy_stream();
  if (number == 2) return context.stream_of_this_thread();
  const std::shared_ptr<Stream> stream = streams().find(handle);
  if (stream == nullptr) throw Refusal{result::kInvalidHandle, "no stream"};
  return stream;
}

}  // namespace gpu_double
