#include "gpu/gpu.h"

#include <string>

namespace ringtrain {
namespace {

constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned kNoTiming = 2;     // CU_EVENT_DISABLE_TIMING
constexpr unsigned kPortable = 1;     // CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE
constexpr int kSuccess = 0, kNotReady = 600;
constexpr int kImplicitlyCaptured = 906;  // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the default stream, while another is
constexpr int kIndependent = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED

CudaAddress address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

}  // namespace

// ------------------------------------------------------------------------------------------------------------- events

GpuEvent::~GpuEvent() { gpu_->give_back(event_); }

int GpuEvent::query() const {
  const Gpu::Current current(*gpu_);
  return gpu_->driver_.EventQuery(event_);
}

bool GpuEvent::is_past() const { return !gpu_->process_.is_this() || query() != kNotReady; }

bool GpuEvent::is_over() const { return has_error_.load(std::memory_order_acquire) || is_past(); }

bool GpuEvent::has_come() const {
  const int code = query();
  if (code == kNotReady) return false;
  gpu_->driver_.check(code, "cuEventQuery");
  return true;
}

void GpuEvent::let_wait(CudaStream stream) const {
  if (has_error_.load(std::memory_order_acquire)) throw *error_;
  const bool is_default = stream == nullptr;
  if (is_default && is_awaited_by_default_.load(std::memory_order_relaxed)) return;
  const Gpu::Current current(*gpu_);
  gpu_->driver_.check(gpu_->driver_.StreamWaitEvent(stream, event_, 0), "cuStreamWaitEvent");
  if (is_default) is_awaited_by_default_.store(true, std::memory_order_relaxed);
}

void GpuEvent::set_error(const Error& error) {
  error_.emplace(error);
  has_error_.store(true, std::memory_order_release);
}

// ---------------------------------------------------------------------------------------------------------------- GPU

Gpu::Current::Current(const Gpu* gpu) {
  if (!gpu) return;
  driver_ = &gpu->driver_;
  CudaContext before = nullptr;
  driver_->CtxGetCurrent(&before);
  is_pushed_ = before != gpu->context_ && driver_->CtxPushCurrent(gpu->context_) == kSuccess;
  captures_before_ = kIndependent;
  driver_->ThreadExchangeStreamCaptureMode(&captures_before_);
}

Gpu::Current::~Current() {
  if (!driver_) return;
  driver_->ThreadExchangeStreamCaptureMode(&captures_before_);
  CudaContext popped;
  if (is_pushed_) driver_->CtxPopCurrent(&popped);
}

std::shared_ptr<Gpu> Gpu::open(int ordinal) {
  const CudaDriver& driver = CudaDriver::get();
  if (ordinal < 0 || ordinal >= driver.devices())
    throw failure("there is no GPU " + std::to_string(ordinal) + ": this process may use " +
                  std::to_string(driver.devices()) + " (CUDA_VISIBLE_DEVICES)");
  return owned_here(new Gpu(ordinal));
}

Gpu::Gpu(int ordinal) : driver_(CudaDriver::get()), ordinal_(ordinal), uuid_(driver_.uuid(ordinal)) {
  int device = 0, least = 0, greatest = 0;
  driver_.check(driver_.DeviceGet(&device, ordinal), "cuDeviceGet");
  driver_.check(driver_.DevicePrimaryCtxRetain(&context_, device), "cuDevicePrimaryCtxRetain");
  const Current current(*this);
  driver_.check(driver_.CtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
  for (CudaStream* stream : {&stream_, &upload_stream_})
    driver_.check(driver_.StreamCreateWithPriority(stream, kNonBlocking, greatest), "cuStreamCreateWithPriority");
}

// The driver lets what is in the streams end first.
Gpu::~Gpu() {
  const Current current(*this);
  for (CudaStream stream : {stream_, upload_stream_}) driver_.StreamDestroy(stream);
  for (CudaEvent event : free_events_) driver_.EventDestroy(event);
}

void Gpu::require_owns(const void* memory) const {
  const int device = driver_.device_of(address_of(memory));
  if (device != ordinal_)
    throw invalid("an array that is said to be on GPU " + std::to_string(ordinal_) + " is on GPU " +
                  std::to_string(device));
}

GpuEventPtr Gpu::record_of_user(CudaStream stream) const {
  const Current current(*this);
  int capturing = 0;
  const int code = driver_.StreamIsCapturing(stream, &capturing);
  if (code != kImplicitlyCaptured) driver_.check(code, "cuStreamIsCapturing");
  if (code == kImplicitlyCaptured || capturing != 0)
    throw invalid(
        "the current stream is being captured into a CUDA graph, and an operation over several ranks cannot "
        "be part of one: call it before or after the capture");
  return record_here(stream);
}

GpuEventPtr Gpu::record(CudaStream stream) const {
  const Current current(*this);
  return record_here(stream);
}

GpuEventPtr Gpu::record_here(CudaStream stream) const {
  CudaEvent event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!free_events_.empty()) {
      event = free_events_.back();
      free_events_.pop_back();
    }
  }
  if (!event) driver_.check(driver_.EventCreate(&event, kNoTiming), "cuEventCreate");
  GpuEventPtr made = owned_here(new GpuEvent(shared_from_this(), event));
  driver_.check(driver_.EventRecord(event, stream), "cuEventRecord");
  return made;
}

GpuEventPtr Gpu::copy_for_user(void* destination, const void* source, size_t bytes, CudaStream stream) const {
  const Current current(*this);
  copy(destination, source, bytes, stream);
  return record_here(stream);
}

// A stream that waits for it already waits for what it was.
void Gpu::give_back(CudaEvent event) const {
  const std::lock_guard lock(mutex_);
  free_events_.push_back(event);
}

void Gpu::copy(void* destination, const void* source, size_t bytes, CudaStream stream) const {
  if (bytes == 0 || destination == source) return;
  note_commands(1);
  driver_.check(driver_.MemcpyAsync(address_of(destination), address_of(source), bytes, stream), "cuMemcpyAsync");
}

void Gpu::clear(void* memory, size_t bytes, CudaStream stream) const {
  if (bytes == 0) return;
  note_commands(1);
  driver_.check(driver_.MemsetD8Async(address_of(memory), 0, bytes, stream), "cuMemsetD8Async");
}

void Gpu::wait(const GpuEvent& event, Watch& watch) const {
  Waiter().poll([&] { return event.has_come(); }, &watch);
}

std::shared_ptr<char> Gpu::pinned(size_t bytes) const {
  const Current current(*this);
  void* memory = nullptr;
  driver_.check(driver_.MemHostAlloc(&memory, bytes, kPortable), "cuMemHostAlloc");
  return owned_here(static_cast<char*>(memory), [gpu = shared_from_this()](char* own) {
    const Current current(*gpu);
    gpu->driver_.MemFreeHost(own);
  });
}

std::shared_ptr<char> Gpu::pin(std::shared_ptr<char> memory, size_t bytes) const {
  const Current current(*this);
  if (driver_.MemHostRegister(memory.get(), bytes, kPortable) != kSuccess) return nullptr;
  return owned_here(memory.get(), [gpu = shared_from_this(), memory](char* own) {
    const Current current(*gpu);
    gpu->driver_.MemHostUnregister(own);
  });
}

}  // namespace ringtrain
