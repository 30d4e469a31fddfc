// Memory that a Group works in: grows to the largest request and stays.
#pragma once

#include <cstddef>
#include <memory>

namespace ringtrain {

class Scratch {
 public:
  // At least `bytes`, uninitialised; what was there before may be gone.
  char* get(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset(new char[bytes]);
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char[]> memory_;
  size_t bytes_ = 0;
};

}  // namespace ringtrain
