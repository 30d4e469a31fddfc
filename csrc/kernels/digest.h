// A number that tells whether two pieces of memory are the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringtrain {

// 64 bits. Two pieces that differ have the same with a chance of 2^-64, unless somebody tries. As fast as memory.
uint64_t digest(const void* data, size_t bytes);

}  // namespace ringtrain
