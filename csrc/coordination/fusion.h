// Joins what is ready into as few operations as the threshold allows, the most urgent first. The same on all ranks.
#pragma once

#include <vector>

#include "coordination/plan.h"

namespace ringtrain {

// Joined are allreduces of one process set, dtype, op and scale, broadcasts of one process set and root, and allgathers
// of one process set. Of equal priority, the order of `agreements` stays.
std::vector<PlanPtr> fuse(std::vector<AgreementPtr> agreements, size_t threshold_bytes);

}  // namespace ringtrain
