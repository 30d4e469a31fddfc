// A thread that sleeps in its Poller: work that other threads give it, and its turns.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/thread_annotations.h"
#include "network/poller.h"

namespace ringtrain {

class Mailbox final : public Watched {
 public:
  using Work = std::function<void()>;

  // On the thread of the Poller, which outlives this.
  explicit Mailbox(Poller& poller);
  ~Mailbox() override;

  // Any thread. It is done by that thread, in order. Nothing happens with what comes after the thread has ended, or in
  // a forked child, where the number of the event may be that of another file.
  void post(Work work) EXCLUDES(mutex_);
  // The thread of the Poller: does all that has come, and then throws the first error of it.
  void empty() EXCLUDES(mutex_);
  // Sleeps until there is something to do for the Poller, or for at most so long.
  void sleep(double longest_s) EXCLUDES(mutex_);

 private:
  void is_ready(uint32_t events) override;

  Poller& poller_;
  const Descriptor event_;
  const OwnProcess process_;
  Mutex mutex_;
  std::vector<Work> letters_ GUARDED_BY(mutex_);
};

// Catches what a turn of a thread throws, such as for lack of descriptors or memory: an exception that left the thread
// would end the process, and the training in it. The next turn tries again, after a pause.
class GuardedTurns {
 public:
  explicit GuardedTurns(std::string thread) : thread_(std::move(thread)) {}

  template <typename Turn>
  void run(Turn turn) {
    if (const auto error = error_of(turn)) pause_after(*error);
  }

 private:
  void pause_after(const Error& error);

  const std::string thread_;
  double told_at_ = 0;
};

}  // namespace ringtrain
