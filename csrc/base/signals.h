// Signals are for the threads of Python, whose handlers run there.
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace ringtrain {

// No signal interrupts this thread while it lives; those that come meanwhile wait, or go to another thread.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

using Thread = std::thread;

// Starts a thread that never gets a signal.
template <typename... Work>
Thread start_thread(Work&&... work) {
  const WithoutSignals blocked;  // it inherits this
  return Thread(std::forward<Work>(work)...);
}

}  // namespace ringtrain
