// Packing, for Groups that can only work on contiguous arrays.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "collectives/group.h"
#include "kernels/copy.h"

namespace ringtrain {

// Calls reduce() with the large ones of these pieces and, in one array in `packed`, the small ones, which then get what
// has become of them. The arrays that it gets are not empty, and there is at least one. No pieces, no call.
void reduce_packed(const std::vector<Piece>& pieces, size_t element_bytes, Scratch& packed,
                   const std::function<void(const std::vector<Piece>&)>& reduce);

// Calls gather() once for each large one of these arrays, and once for all small ones together, laid side by side in
// `packed`. Its argument is not empty.
void gather_packed(const std::vector<Group::Gathering>& arrays, int rank, Scratch& packed,
                   const std::function<void(const Group::Gathering&)>& gather);

// The same for scatter(), of arrays of such elements.
void scatter_packed(const std::vector<Group::Scattering>& arrays, int rank, size_t element_bytes, Scratch& packed,
                    const std::function<void(const Group::Scattering&)>& scatter);

}  // namespace ringtrain
