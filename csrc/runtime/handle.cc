#include "runtime/handle.h"

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
  done_.publish(1);
}

void Handle::fail(ErrorKind kind, const std::string& message) {
  error_ = kind;
  message_ = message;
  done_.publish(1);
}

}  // namespace ringtrain
