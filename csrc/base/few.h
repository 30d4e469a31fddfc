// A list that allocates nothing while it has one element, as most operations have one tensor.
#pragma once

#include <cstddef>
#include <vector>

namespace ringtrain {

template <typename Value>
class Few {
 public:
  void push_back(Value value) {
    if (size_ == 0)
      first_ = value;
    else
      others_.push_back(value);
    ++size_;
  }
  size_t size() const { return size_; }
  const Value& operator[](size_t place) const { return place == 0 ? first_ : others_[place - 1]; }

 private:
  size_t size_ = 0;
  Value first_{};
  std::vector<Value> others_;
};

}  // namespace ringtrain
