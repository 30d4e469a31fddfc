// Work for a thread that sleeps in its Poller, from other threads.
#pragma once

#include <functional>
#include <vector>

#include "base/descriptor.h"
#include "base/thread_annotations.h"
#include "network/poller.h"

namespace ringtrain {

class Mailbox final : public Watched {
 public:
  using Work = std::function<void()>;

  // On the thread of the Poller, which outlives this.
  explicit Mailbox(Poller& poller);
  ~Mailbox() override;

  // Any thread. It is done by that thread, in order. Nothing happens with what comes after the thread has ended.
  void post(Work work) EXCLUDES(mutex_);
  // The thread of the Poller: does what has come.
  void empty() EXCLUDES(mutex_);
  // Sleeps until there is something to do for the Poller, or for at most so long.
  void sleep(double longest_s);

 private:
  void is_ready(uint32_t events) override;

  Poller& poller_;
  const Descriptor event_;
  Mutex mutex_;
  std::vector<Work> letters_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
