#include "stream.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <thread>

#include "settings.h"

namespace gpu_double {
namespace {

thread_local bool of_a_stream = false;

std::atomic<long>& delay_us() {
  static std::atomic<long> delay{settings().delay_us};
  return delay;
}

// Signals are for the threads of the program.
void block_all_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

bool is_stream_thread() { return of_a_stream; }

void set_delay_us(long delay) { delay_us() = delay; }

uint64_t Stream::enqueue(Work work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([self = shared_from_this()] { self->carry_out(); }).detach();
  }
  changed_.notify_all();
  return ++enqueued_;
}

uint64_t Stream::tail() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return enqueued_;
}

bool Stream::has_done(uint64_t ticket) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= ticket;
}

void Stream::wait_for(uint64_t ticket) const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= ticket; });
}

void Stream::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

bool Stream::is_over() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_closed_ && done_ == enqueued_;
}

bool Stream::take(Work& work) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return is_closed_ || !queue_.empty(); });
  if (queue_.empty()) return false;
  work = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

void Stream::carry_out() {
  of_a_stream = true;
  block_all_signals();
  for (Work work; take(work);) {
    if (delay_us() > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us()));
    work();
    // Objects that the work holds, perhaps a stream, are gone before its end is visible.
    work = nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    ++done_;
    changed_.notify_all();
  }
}

}  // namespace gpu_double
