// Takes the place of csrc/base/descriptor.h in the simulation of stores: the end of a simulated connection,
// or a socket that listens at a port.
#pragma once

#include <utility>

namespace ringtrain {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  // Closing it does nothing: the Connector stops listening.
  static Descriptor listening_at(int port) { return Descriptor(kFirstPort - port); }
  int port() const { return kFirstPort - number_; }

  int number() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  static constexpr int kFirstPort = -2;

  int number_ = -1;
};

}  // namespace ringtrain
