// Primary contexts, one for each GPU, and which of them is current in a thread.
//
// Any thread. A Context is never destroyed; released by all who retained it, it is not active.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "cuda.h"
#include "stream.h"

namespace gpu_double {

class Context {
 public:
  explicit Context(CUdevice of) : device(of) {}

  // The first call that retains it makes it active.
  void retain();
  // Returns whether that was the last one; then what is in flight has ended, and the context has no stream any more.
  bool release();
  bool is_active() const;

  std::shared_ptr<Stream> make_stream(bool is_blocking, int priority);
  std::shared_ptr<Stream> legacy_stream();
  std::shared_ptr<Stream> stream_of_this_thread();

  // Behind what the stream has, and in the order that CUDA promises between the legacy stream and blocking ones.
  Point enqueue(const std::shared_ptr<Stream>& stream, Stream::Work work);
  // Refuses where the stream is capturing, or the legacy stream is used while a blocking one is.
  void require_not_capturing(const Stream& stream) const;
  // For calls that CUDA calls unsafe. Refuses while a stream is capturing, as if that had begun in the mode "global",
  // unless this thread is in the mode "relaxed".
  void require_safe() const;
  // Until all streams have done all that they have now.
  void synchronize() const;

  const CUdevice device;

 private:
  std::shared_ptr<Stream> add_stream(bool is_blocking, int priority);
  std::vector<Point> what_comes_first(const Stream& stream) const;

  mutable std::mutex mutex_;
  // guarded by mutex_
  int retained_ = 0;
  std::vector<std::shared_ptr<Stream>> streams_;  // also closed ones that still have work
  std::shared_ptr<Stream> legacy_;
  std::map<long, std::shared_ptr<Stream>> of_threads_;
};

Context& primary_context(CUdevice device);
// Refuses what is no active context.
Context& context_of(CUcontext handle);

// Null where this thread has none.
Context* current_context_or_none();
// Also refuses before cuInit.
Context& current_context();
void push_current(Context& context);
// Refuses where there is none.
Context& pop_current();
// Null: this thread has none any more.
void set_current(Context* context);
// Sets what calls of this thread may do while a stream is capturing, as CUDA numbers it. Returns the value before.
int exchange_capture_mode(int mode);

// The streams that were created and not destroyed.
CUstream open_stream(Context& context, bool is_blocking, int priority);
void destroy_stream(CUstream handle);
void forget_streams_of(const Context& context);
size_t count_streams();
// `handle` may be one of the default streams of `context`.
std::shared_ptr<Stream> stream_of(Context& context, CUstream handle);

}  // namespace gpu_double
