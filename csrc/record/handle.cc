#include "record/handle.h"

namespace ringtrain {

bool Handle::wait(double timeout_s) {
  thread_local Waiter waiter;
  if (is_done() || waiter.is_quick([&] { return is_done(); })) return true;
  done_.sleep(0, timeout_s);
  return is_done();
}

bool Handle::is_memory_free() const {
  return is_done() && loan_.expired() && (!result_.done || result_.done->is_past());
}

const Result& Handle::result() const {
  if (error_ != ErrorKind::none) throw Error(error_, message_);
  return result_;
}

void Handle::finish(Result result) {
  result_ = std::move(result);
  publish();
}

void Handle::fail(ErrorKind kind, const std::string& message) {
  error_ = kind;
  message_ = message;
  publish();
}

void Handle::on_done(std::function<void()> callback) {
  {
    const Lock lock(mutex_);
    if (!is_done()) return callbacks_.push_back(std::move(callback));
  }
  callback();
}

// on_done holds the mutex while it sees that this is not done, so its callback is registered by then.
void Handle::publish() {
  done_.publish(1);
  std::vector<std::function<void()>> callbacks;
  {
    const Lock lock(mutex_);
    callbacks_.swap(callbacks);
  }
  for (const auto& callback : callbacks) callback();
}

}  // namespace ringtrain
