// File descriptors of this process alone.
#pragma once

#include <utility>

namespace ringtrain {

// Closed when its owner goes, and at once in a forked child: one that kept a socket would keep its connection open when
// the parent is dead.
class Descriptor {
 public:
  Descriptor() = default;  // none
  // Takes it over. Negative: none.
  explicit Descriptor(int number);
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

}  // namespace ringtrain
