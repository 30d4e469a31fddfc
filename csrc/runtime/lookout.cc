#include "runtime/lookout.h"

#include <sys/prctl.h>

#include <utility>

#include "base/signals.h"
#include "kernels/reduce.h"

namespace ringtrain {
namespace {

// Sleeps of these threads end when they should, not up to 50 us later.
constexpr unsigned long kTimerSlack_ns = 1000;

thread_local bool is_on_lookout = false;

}  // namespace

bool Lookout::is_here() { return is_on_lookout; }

void Lookout::start() {
  const Lock lock(mutex_);
  threads_.push_back(start_thread(&Lookout::run, this));
}

void Lookout::run() {
  const KeptDenormals denormals;
  prctl(PR_SET_TIMERSLACK, kTimerSlack_ns);
  mutex_.lock();
  while (true) {
    ++spare_;
    while (is_taken_ && !is_over_) free_.wait(mutex_);
    --spare_;
    if (is_over_) break;
    is_taken_ = is_on_lookout = true;
    mutex_.unlock();
    look_out_();
    mutex_.lock();
    if (is_on_lookout) is_over_ = true;
    if (is_over_) break;
  }
  free_.notify_all();
  mutex_.unlock();
}

void Lookout::hand_over() {
  if (!is_on_lookout || !is_shared_) return;
  is_on_lookout = false;
  const Lock lock(mutex_);
  is_taken_ = false;
  if (spare_ > 0)
    free_.notify_one();
  else
    threads_.push_back(start_thread(&Lookout::run, this));
}

// A thread that is joined may have started another one before.
void Lookout::end() {
  while (true) {
    std::vector<std::thread> threads;
    {
      const Lock lock(mutex_);
      std::swap(threads, threads_);
    }
    if (threads.empty()) return;
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace ringtrain
