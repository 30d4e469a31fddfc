// The Timeline of this process, for whatever has something to show in it.
#pragma once

#include <memory>

#include "record/timeline.h"

namespace ringtrain {

// Any thread. Whoever makes a Timeline owns it, and announces it; null takes that back.
void announce_timeline(const std::shared_ptr<Timeline>& timeline);
// Costs nearly nothing. False is certain.
bool may_have_timeline();
// Null where there is none, or no more.
std::shared_ptr<Timeline> current_timeline();

}  // namespace ringtrain
