// A stream: work that is carried out in order by a thread of its own.
//
// Any thread may call anything here, but work must not wait for its own stream.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace gpu_double {

class Context;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Work = std::function<void()>;

  Stream(Context& of, bool blocking, int its_priority) : context(of), is_blocking(blocking), priority(its_priority) {}

  // Returns the work's ticket.
  uint64_t enqueue(Work work);
  // The ticket of the last work so far, 0 if there was none.
  uint64_t tail() const;
  bool has_done(uint64_t ticket) const;
  void wait_for(uint64_t ticket) const;
  // No work comes any more; the thread ends after what there is.
  void close();
  bool is_over() const;

  Context& context;
  const bool is_blocking;  // with respect to the legacy default stream
  const int priority;
  std::atomic<bool> is_capturing{false};

 private:
  void carry_out();
  bool take(Work& work);

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // guarded by mutex_
  std::deque<Work> queue_;
  uint64_t enqueued_ = 0;
  uint64_t done_ = 0;
  bool has_thread_ = false;
  bool is_closed_ = false;
};

// A place in a stream, after the work of that ticket. The default is reached already.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t ticket = 0;

  bool is_reached() const { return stream == nullptr || stream->has_done(ticket); }
  void wait() const {
    if (stream != nullptr) stream->wait_for(ticket);
  }
};

// Whether this thread carries out the work of a stream; such a thread must not call the driver.
bool is_stream_thread();

// Before each piece of work from now on.
void set_delay_us(long delay_us);

}  // namespace gpu_double
