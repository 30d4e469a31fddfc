// Whether a NcclGroup should pack small arrays together: copies on the GPU against more operations in one call.
#pragma once

#include "collectives/gpu/nccl_group.h"

namespace ringtrain {

// Tries both and tells the group what is faster here. All ranks at the same time.
void find_packing(NcclGroup& group, GpuPool& pool, Watch& watch);

}  // namespace ringtrain
