// Objects behind opaque handles. No handle is ever given twice, so one that was destroyed is known as such.
//
// Any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace gpu_double {

template <typename Object>
class Handles {
 public:
  explicit Handles(uintptr_t first) : next_(first) {}

  void* add(std::shared_ptr<Object> object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    next_ += 64;
    void* handle = reinterpret_cast<void*>(next_);
    objects_[handle] = std::move(object);
    return handle;
  }

  // Null where the handle is unknown.
  std::shared_ptr<Object> find(void* handle) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Object> remove(void* handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    const std::shared_ptr<Object> object = found->second;
    objects_.erase(found);
    return object;
  }

  template <typename Condition>
  void remove_if(Condition condition) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = objects_.begin(); at != objects_.end();) at = condition(*at->second) ? objects_.erase(at) : ++at;
  }

  template <typename Function>
  void each(Function function) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [handle, object] : objects_) function(*object);
  }

  size_t count() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return objects_.size();
  }

 private:
  mutable std::mutex mutex_;
  uintptr_t next_;
  std::map<void*, std::shared_ptr<Object>> objects_;
};

}  // namespace gpu_double
