// Shared segments for the ranks of each node, made by all ranks of the world together: everybody has one, or nobody.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "coordination/channel.h"
#include "fabric/shm.h"
#include "runtime/world.h"

namespace ringtrain {

// A segment named after `purpose` on every node of `placement`, of bytes_for(ranks of the placement on this node). All
// ranks of the world call this, those outside the placement too. Returns a segment without data where this rank needs
// none, and everywhere when it could not be had somewhere; then it warns.
SharedSegment make_segments(const World& world, const Placement& placement, const std::string& purpose,
                            const std::function<size_t(int)>& bytes_for, Channel& channel);

}  // namespace ringtrain
