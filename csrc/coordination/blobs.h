// What several ranks say in one message: of each what it does not begin with as the rank before it does.
//
// In the first step of a training all ranks announce the same gradients, so the message grows by a few bytes a rank.
#pragma once

#include <vector>

#include "base/bytes.h"

namespace ringtrain {

Bytes joined(const std::vector<Bytes>& blobs);
// Throws failure unless there are so many.
std::vector<Bytes> separated(const Bytes& message, size_t count);

}  // namespace ringtrain
