#include "kvstore/worker/store_handle.h"

#include <utility>

#include "record/timeline.h"

namespace ringtrain {

void StoreHandle::require_success() {
  const Lock lock(mutex_);
  if (error_) throw Error(*error_);
}

bool StoreHandle::is_waited_for_again(double now, double period_s) {
  const double ends_s = period_ends_s_.load(std::memory_order_relaxed);
  if (ends_s != 0 && now < ends_s) return false;
  period_ends_s_.store(now + period_s, std::memory_order_relaxed);
  return ends_s != 0;
}

void StoreHandle::show(std::string track, const char* kind) {
  track_ = std::move(track);
  kind_ = kind;
  begin_s_ = begin_of_stretch();
}

void StoreHandle::end_one(const std::optional<Error>& error) {
  if (error) fail(*error);
  if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  note_stretch(begin_s_, track_, [&] { return in_capitals(kind_); });
  done_.publish(1);
}

void StoreHandle::fail(const Error& error) {
  {
    const Lock lock(mutex_);
    if (!error_) error_ = error;
  }
  done_.publish(1);
}

}  // namespace ringtrain
