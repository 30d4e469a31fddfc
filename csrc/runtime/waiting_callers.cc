#include "runtime/waiting_callers.h"

namespace ringtrain {

WaitingCallers::Caller::Caller(WaitingCallers& all, const Handle& handle, Flag* kept_bell)
    : all_(all), handle_(handle), kept_bell_(kept_bell) {
  const Lock lock(all_.mutex_);
  all_.callers_.push_back(this);
  all_.count_.fetch_add(1, std::memory_order_seq_cst);
}

WaitingCallers::Caller::~Caller() {
  const Lock lock(all_.mutex_);
  all_.callers_.erase(std::find(all_.callers_.begin(), all_.callers_.end(), this));
  all_.count_.fetch_sub(1, std::memory_order_seq_cst);
}

void WaitingCallers::Caller::sleep(double timeout_s) {
  thread_local Waiter waiter;
  if (!waiter.is_quick([&] { return handle_.is_done() || is_called(); })) called_.sleep(0, timeout_s);
}

// The thread that has the turn has said that the bell need not wake anybody.
void WaitingCallers::Caller::call() {
  called_.publish(1);
  if (kept_bell_) kept_bell_->ring_all();
}

void WaitingCallers::call_done() {
  if (!any()) return;
  const Lock lock(mutex_);
  for (Caller* caller : callers_)
    if (caller->handle_.is_done() && !caller->is_called()) caller->call();
}

void WaitingCallers::call_all() {
  const Lock lock(mutex_);
  for (Caller* caller : callers_) caller->call();
}

bool WaitingCallers::call_next() {
  // Either who says meanwhile that it waits is seen here, or it sees that the turn is free.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!any()) return false;
  const Lock lock(mutex_);
  const auto is_called = [](const Caller* caller) { return caller->is_called(); };
  const auto keeps_bell = [](const Caller* caller) { return caller->kept_bell_ != nullptr; };
  if (std::any_of(callers_.begin(), callers_.end(), is_called)) return true;
  if (callers_.empty() || std::any_of(callers_.begin(), callers_.end(), keeps_bell)) return false;
  callers_.front()->call();
  return true;
}

}  // namespace ringtrain
