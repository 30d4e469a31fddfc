// The exported calls of the driver: streams and events.
#include <algorithm>

#include "call.h"
#include "context.h"
#include "event.h"

using namespace gpu_double;

namespace {

CUstream make_stream(unsigned flags, int priority) {
  require((flags & ~kStreamNonBlocking) == 0);
  const int within_range = std::min(std::max(priority, kGreatestPriority), kLeastPriority);
  return open_stream(current_context(), (flags & kStreamNonBlocking) == 0, within_range);
}

std::shared_ptr<Stream> idle_or_working(CUstream handle) {
  Context& context = current_context();
  std::shared_ptr<Stream> stream = stream_of(context, handle);
  stream->context.require_not_capturing(*stream);
  return stream;
}

}  // namespace

extern "C" {

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return Call("cuStreamCreate", flags).run([&] {
    require(stream != nullptr);
    *stream = make_stream(flags, kLeastPriority);
  });
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  return Call("cuStreamCreateWithPriority", flags, priority).run([&] {
    require(stream != nullptr);
    *stream = make_stream(flags, priority);
  });
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  return Call("cuStreamDestroy_v2", stream).run([&] {
    current_context();
    destroy_stream(stream);
  });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return Call("cuStreamWaitEvent", stream, event).run([&] {
    Context& context = current_context();
    require((flags & ~1u) == 0);
    const std::shared_ptr<Stream> waiting = stream_of(context, stream);
    const auto point = event_of(event)->last();
    if (point == nullptr) return;
    waiting->context.enqueue(waiting, [point] { point->wait(); });
  });
}

CUresult cuStreamSynchronize(CUstream stream) {
  return Call("cuStreamSynchronize", stream).run([&] {
    const std::shared_ptr<Stream> waited_for = idle_or_working(stream);
    waited_for->wait_for(waited_for->tail());
  });
}

CUresult cuStreamQuery(CUstream stream) {
  return Call("cuStreamQuery", stream).run([&] {
    const std::shared_ptr<Stream> asked = idle_or_working(stream);
    if (!asked->has_done(asked->tail())) throw Refusal{result::kNotReady, "the stream has work"};
  });
}

CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  return Call("cuStreamIsCapturing", stream).run([&] {
    Context& context = current_context();
    require(status != nullptr);
    const std::shared_ptr<Stream> asked = stream_of(context, stream);
    *status = asked->is_capturing ? 1 : 0;
    if (!asked->is_capturing) asked->context.require_not_capturing(*asked);
  });
}

CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  return Call("cuThreadExchangeStreamCaptureMode").run([&] {
    require(mode != nullptr && *mode >= 0 && *mode <= 2);
    *mode = exchange_capture_mode(*mode);
  });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  return Call("cuEventCreate", flags).run([&] {
    Context& context = current_context();
    require(event != nullptr && flags < 8);
    *event = open_event(context);
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return Call("cuEventRecord", event, stream).run([&] {
    Context& context = current_context();
    const std::shared_ptr<Event> recorded = event_of(event);
    const std::shared_ptr<Stream> recording = stream_of(context, stream);
    if (&recorded->context != &recording->context)
      throw Refusal{result::kInvalidHandle, "event and stream are of two contexts"};
    recorded->record(recording);
  });
}

CUresult cuEventQuery(CUevent event) {
  return Call("cuEventQuery", event).run([&] {
    current_context().require_safe();
    const auto point = event_of(event)->last();
    if (point != nullptr && !point->is_reached()) throw Refusal{result::kNotReady, "the event is not reached"};
  });
}

CUresult cuEventSynchronize(CUevent event) {
  return Call("cuEventSynchronize", event).run([&] {
    current_context();
    const auto point = event_of(event)->last();
    if (point != nullptr) point->wait();
  });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return Call("cuEventDestroy_v2", event).run([&] {
    current_context();
    destroy_event(event);
  });
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  return Call("cuLaunchHostFunc", stream).run([&] {
    Context& context = current_context();
    require(function != nullptr);
    const std::shared_ptr<Stream> calling = stream_of(context, stream);
    calling->context.enqueue(calling, [function, data] { function(data); });
  });
}
}
