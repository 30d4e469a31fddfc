// Which of two Groups of the same ranks is faster here, found out by trying.
#pragma once

#include <memory>

#include "collectives/group.h"
#include "network/mpi.h"

namespace ringtrain {

// Whether `challenger` needs at most four fifths of the time of `champion` for an allreduce of so many bytes; no less
// is worth giving up that every job adds in the same order. All ranks come to the same result, after a few tens of
// milliseconds: where one allreduce takes more than ten, the champion stays.
bool is_clearly_faster(std::shared_ptr<Group> challenger, std::shared_ptr<Group> champion, size_t bytes, Mpi& mpi);

}  // namespace ringtrain
