#include "mxnet/lines.h"

#include <algorithm>
#include <utility>

namespace ringtrain {

void Lines::join(const Key& key, Waiting* waiting) {
  const Lock lock(mutex_);
  lines_[key].waiting.push_back(waiting);
}

void Lines::ready(Key key, Waiting* waiting) {
  {
    const Lock lock(mutex_);
    waiting->is_ready = true;
    Line& line = lines_.at(key);
    if (std::exchange(line.is_served, true)) return;
  }
  serve(key);
}

void Lines::leave(Key key, const Waiting* waiting) {
  {
    const Lock lock(mutex_);
    const auto it = lines_.find(key);
    if (it == lines_.end()) return;
    Line& line = it->second;
    const auto place = std::find(line.waiting.begin(), line.waiting.end(), waiting);
    if (place == line.waiting.end()) return;
    line.waiting.erase(place);
    if (std::exchange(line.is_served, true)) return;
  }
  serve(key);
}

void Lines::serve(const Key& key) {
  while (const std::function<void()> begin = next(key)) begin();
}

// Null where there is nothing to call: then the line is left to the next operation.
std::function<void()> Lines::next(const Key& key) {
  const Lock lock(mutex_);
  const auto it = lines_.find(key);
  Line& line = it->second;
  if (line.waiting.empty()) {
    lines_.erase(it);
    return nullptr;
  }
  Waiting* first = line.waiting.front();
  if (!first->is_ready) {
    line.is_served = false;
    return nullptr;
  }
  line.waiting.pop_front();
  return std::move(first->begin);
}

}  // namespace ringtrain
