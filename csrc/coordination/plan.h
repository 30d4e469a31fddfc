// Plans: the operations that all ranks carry out next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "coordination/operation.h"

namespace ringtrain {

// One operation that every rank of its process set is ready for, or the error that they all get for it.
struct Agreement {
  Operation operation;   // for the ranks' own first dimensions see `rows`
  int32_t priority = 0;  // of the first rank that announced it
  ErrorKind error = ErrorKind::none;
  std::string message;
  std::vector<std::vector<int64_t>> rows;  // allgather: for each tensor the first dimension of every rank of the set
  int64_t result = 0;                      // join: the last rank to join; a new process set: its id
  int64_t unnamed = 0;                     // join: how many operations without a name all ranks count from now on
  std::vector<int> joined;                 // ranks that have submitted nothing, since they have joined; ascending

  bool has_joined(int rank) const { return std::binary_search(joined.begin(), joined.end(), rank); }
};

using AgreementPtr = std::shared_ptr<const Agreement>;

// Without what is the same as of the one before, such as the ranks that have joined.
void write(Writer& writer, const Agreement& agreement, const Agreement& before);
// Throws as read_operation().
Agreement read_agreement(Reader& reader, int world_size, const Agreement& before);

// One or more agreements that are carried out as one operation. Shared with the coordinator, which remembers plans that
// it makes again and again.
struct Plan {
  std::vector<AgreementPtr> parts;  // the most urgent first
  std::string title;                // for messages: "allreduce \"layer1.weight\" and 3 more"

  int32_t priority() const { return parts.front()->priority; }
};
using PlanPtr = std::shared_ptr<const Plan>;

// Joins what is ready into as few operations as the threshold allows, the most urgent first. The same on all ranks.
//
// Joined are allreduces of one process set, dtype, op and scale, reducescatters likewise, broadcasts of one process set
// and root, and allgathers of one process set. Of equal priority, the order of `agreements` stays.
std::vector<PlanPtr> fuse(std::vector<AgreementPtr> agreements, size_t threshold_bytes);

}  // namespace ringtrain
