// The present state of this rank, as JSON: docs/launching.md describes it. No value of a tensor is in it.
#pragma once

#include <map>
#include <string>

namespace ringtrain {

// Any thread, with or without an Engine. Takes no turn and no GIL, so it also tells of a rank that hangs. `since_s`:
// when this rank has joined the job.
std::string status_text(int rank, double since_s);

// {"3": "T"}: the states of other processes of this host, by rank, as /proc has them; "" where there is no process.
std::string states_text(const std::map<int, int>& pids);

// ["/scratch"]: where the disks of this host are mounted that are full. Does not wait for one that hangs.
std::string full_disks_text();

}  // namespace ringtrain
