// A thread for calls that block and take no deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "base/wait.h"

namespace ringtrain {

// One call at a time; the caller waits for it with a Watch. Both spin for a moment before they sleep: a call follows
// the other. Not shared between threads, but for is_busy().
class CallThread {
 public:
  CallThread();
  // A call that has not ended is left to itself.
  ~CallThread();
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  // The result of `call`. If the Watch throws, the call goes on alone, maybe for ever: it must own, or have by value,
  // all that it uses. It must not throw.
  template <typename Call>
  auto run(Call call, Watch& watch) -> decltype(call()) {
    const auto result = std::make_shared<std::optional<decltype(call())>>();
    waiter_.wait(state_->ended, calls_, &watch);  // one that was left alone
    state_->next = [result, call = std::move(call)] { result->emplace(call()); };
    state_->asked.publish(++calls_);
    waiter_.wait(state_->ended, calls_, &watch);
    return std::move(**result);
  }

  // Any thread. Whether there is a call, be it one that was left alone.
  bool is_busy() const {
    return state_->ended.value.load(std::memory_order_acquire) != state_->asked.value.load(std::memory_order_acquire);
  }

 private:
  // Shared with the thread, which may outlive this. The flags count calls.
  struct State {
    alignas(64) Flag asked;
    alignas(64) Flag ended;
    std::function<void()> next;  // written by the caller before it asks, taken by the thread
    std::atomic<bool> is_left{false};
  };
  static void work(State& state);

  const std::shared_ptr<State> state_;
  uint32_t calls_ = 0;
  Waiter waiter_;
};

}  // namespace ringtrain
