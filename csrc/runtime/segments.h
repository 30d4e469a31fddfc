// Shared segments for the ranks of each node, made by all ranks of the world together: everybody has one, or nobody.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "coordination/channel.h"
#include "memory/shm.h"
#include "runtime/world.h"

namespace ringtrain {

struct SegmentPlan {
  std::string purpose;               // the segment's name is made of it
  std::function<size_t(int)> bytes;  // for so many ranks
  SharedSegment::Pages pages = SharedSegment::Pages::reserved;
  const char* if_it_fails =
      "All ranks go through the network instead, which is slower.";  // the end of a warning; null for no warning
};

// A segment on every node of `placement` for the ranks of the placement that are there. All ranks of the world call
// this, those outside the placement too. Returns a segment without data where this rank needs none, and everywhere when
// it could not be had somewhere; then it warns.
SharedSegment make_segments(const World& world, const Placement& placement, const SegmentPlan& plan, Channel& channel);

}  // namespace ringtrain
