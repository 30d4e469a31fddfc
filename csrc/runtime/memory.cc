#include "runtime/memory.h"

#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/copy.h"
#include "kernels/reduce.h"

namespace ringtrain {

void HostMemory::copy(void* destination, const void* source, size_t bytes) {
  ringtrain::copy(destination, source, bytes);
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
  // Not aligned_alloc: before glibc 2.38 that finds no place in what was freed by one of the same size, and the heap
  // grows with every result.
  constexpr size_t kLine = 64;
  size_t space = spec.bytes() + kLine;  // never none
  auto* memory = static_cast<char*>(std::malloc(space));
  if (!memory)
    throw failure("out of memory: " + std::to_string(space >> 20) + " MB for a result of " + to_string(spec));
  void* aligned = memory;
  std::align(kLine, spec.bytes(), aligned, space);
  return {spec, std::shared_ptr<char>(static_cast<char*>(aligned), [memory](char*) { std::free(memory); }), nullptr};
}

}  // namespace ringtrain
