// Values of one dtype as those of another one: 16-bit floats to float32 and back, or as they are.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace ringtrain {

// Throws invalid for other pairs.
void convert(const void* from, DType from_dtype, void* to, DType to_dtype, size_t count);

}  // namespace ringtrain
