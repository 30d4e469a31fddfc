// What this rank has done: its last operations, and sums over all of them.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "record/submission.h"

namespace ringtrain {

// Of all operations of one kind that have ended.
struct Totals {
  uint64_t operations = 0, failed = 0, bytes = 0;
  // Seconds, summed over the operations: until it was announced, until all ranks were ready, until its turn came, and
  // while it was carried out.
  double queued_s = 0, waiting_s = 0, ready_s = 0, working_s = 0;
};

// Guarded by the Inbox. Keeps no memory of the user's and no results.
class History {
 public:
  // The one that it keeps no longer for that, or null.
  SubmissionPtr add(SubmissionPtr submission);
  // The last 1,024 that have ended, in this order.
  std::vector<SubmissionPtr> last() const;
  const std::map<OpKind, Totals>& totals() const { return totals_; }

 private:
  std::vector<SubmissionPtr> ring_;
  size_t next_ = 0;  // to be overwritten, once the ring is full
  std::map<OpKind, Totals> totals_;
};

}  // namespace ringtrain
