#include "kernels/copy.h"

#include <cstdint>
#include <cstring>

#include "kernels/reduce.h"

namespace ringtrain {
namespace {

// From 2 KB on glibc copies by the processor's own instruction (rep movsb). On AMD's Zen that takes five to ten times
// as long where the destination begins up to 31 bytes behind the source, page offset by page offset (glibc's bug
// 30994). Arrays of NumPy begin 16 bytes behind a page, and mailboxes on a cache line, so every so many meet this.
bool is_slow_for_memcpy(const void* destination, const void* source, size_t bytes) {
  constexpr uintptr_t kPage = 4096, kNear = 32;
  constexpr size_t kLong = 2048;
  const uintptr_t behind = (reinterpret_cast<uintptr_t>(destination) - reinterpret_cast<uintptr_t>(source)) % kPage;
  return bytes > kLong && behind > 0 && behind < kNear;
}

}  // namespace

void copy(void* destination, const void* source, size_t bytes) {
  if (bytes == 0 || destination == source) return;
  if (is_slow_for_memcpy(destination, source, bytes))
    reduce({DType::uint8}, &destination, 1, &source, 1, bytes);  // a sum of one
  else
    std::memcpy(destination, source, bytes);
}

}  // namespace ringtrain
