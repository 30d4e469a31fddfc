#include "base/call_thread.h"

#include "base/signals.h"

namespace ringtrain {
namespace {

// Of a thread that has nothing else to do.
class Idleness final : public Watch {
 public:
  void check(double) override {}
  double interval_s(double) const override { return 1; }
};

}  // namespace

CallThread::CallThread() : state_(std::make_shared<State>()) {
  start_thread([state = state_] { work(*state); }).detach();
}

CallThread::~CallThread() {
  state_->is_left.store(true, std::memory_order_relaxed);
  state_->asked.publish(calls_ + 1);
}

void CallThread::work(State& state) {
  Waiter waiter;
  Idleness idleness;
  for (uint32_t number = 1;; ++number) {
    waiter.wait(state.asked, number, &idleness);
    if (state.is_left.load(std::memory_order_relaxed)) return;
    state.next();
    state.next = nullptr;  // what it owns goes before the caller goes on
    state.ended.publish(number);
  }
}

}  // namespace ringtrain
