// What quantized operations have left out so far, by operation: it goes with the next one of that name.
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "coordination/operation.h"

namespace ringtrain {

// Requires Engine::turn_.
class Residuals {
 public:
  // One array for each tensor, as long as it. Zeros at first, and when the name comes with other shapes.
  std::vector<float*> of(const Operation& operation);
  // Of all operations of a process set.
  void forget(int process_set);

 private:
  struct Freed {
    void operator()(float* memory) const { std::free(memory); }
  };
  struct Residual {
    std::unique_ptr<float, Freed> memory;
    int64_t count = 0;
  };
  std::map<Key, std::vector<Residual>> residuals_;
};

}  // namespace ringtrain
