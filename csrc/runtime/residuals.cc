#include "runtime/residuals.h"

#include <algorithm>
#include <new>

namespace ringtrain {

std::vector<float*> Residuals::of(const Operation& operation) {
  std::vector<Residual>& residuals = residuals_[key_of(operation)];
  const std::vector<TensorSpec>& tensors = operation.tensors;
  const bool fits = std::equal(residuals.begin(), residuals.end(), tensors.begin(), tensors.end(),
                               [](const Residual& one, const TensorSpec& spec) { return one.count == spec.count(); });
  if (!fits) {
    residuals.clear();
    for (const TensorSpec& spec : tensors) {
      // The system gives pages of zeros when they are touched: a rank has those of its lane.
      auto* memory = static_cast<float*>(std::calloc(std::max<size_t>(spec.bytes(), 1), 1));
      if (!memory) throw std::bad_alloc();
      residuals.push_back({std::unique_ptr<float, Freed>(memory), spec.count()});
    }
  }
  std::vector<float*> arrays;
  for (const Residual& residual : residuals) arrays.push_back(residual.memory.get());
  return arrays;
}

void Residuals::forget(int process_set) {
  for (auto it = residuals_.begin(); it != residuals_.end();)
    it = it->first.first == process_set ? residuals_.erase(it) : std::next(it);
}

}  // namespace ringtrain
