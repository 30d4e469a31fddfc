// What Groups share that can only reduce contiguous arrays.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "collectives/scratch.h"
#include "kernels/pack.h"

namespace ringtrain {

// Calls reduce() with the large ones of these pieces and, in one array in `packed`, the small ones, which then get what
// has become of them. The arrays that it gets are not empty, and there is at least one. No pieces, no call.
void reduce_packed(const std::vector<Piece>& pieces, size_t element_bytes, Scratch& packed,
                   const std::function<void(const std::vector<Piece>&)>& reduce);

}  // namespace ringtrain
