// Packing, for Groups that can only work on contiguous arrays.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "collectives/group.h"
#include "collectives/network/chooser.h"
#include "kernels/copy.h"

namespace ringtrain {

inline constexpr size_t kLargeBytes = 1 << 20;  // from here on packing costs more than another operation

// Calls visit(way, arrays) for all of these arrays that are to take a way of the chooser for so many parts of an array:
// each that for itself, or all together where the way changes no bits.
void for_each_way(const Chooser& chooser, const Reduction& reduction, size_t parts,
                  const std::vector<Group::Scattering>& arrays,
                  const std::function<void(Way, const std::vector<Group::Scattering>&)>& visit);

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
