#include "runtime/memory.h"

#include <cstdlib>
#include <cstring>

#include "kernels/reduce.h"

namespace ringtrain {

void HostMemory::copy(void* destination, const void* source, size_t bytes) {
  if (destination != source && bytes > 0) std::memcpy(destination, source, bytes);
}

void HostMemory::scale(DType dtype, double factor, void* destination, const void* source, size_t count) {
  ringtrain::scale(dtype, factor, destination, source, count);
}

char* HostMemory::zeros(size_t bytes) {
  char* zeros = zeros_.get(bytes);
  std::memset(zeros, 0, bytes);
  return zeros;
}

OwnedTensor HostMemory::allocate(const TensorSpec& spec) {
  constexpr size_t kLine = 64;
  const size_t bytes = (spec.bytes() + kLine) / kLine * kLine;  // never none
  auto* memory = static_cast<char*>(std::aligned_alloc(kLine, bytes));
  if (!memory)
    throw failure("out of memory: " + std::to_string(bytes >> 20) + " MB for a result of " + to_string(spec));
  return {spec, std::shared_ptr<char>(memory, std::free), nullptr};
}

}  // namespace ringtrain
