// Who has announced what in full. Kept by rank 0; the others' ledgers stay empty.
//
// An entry becomes an Agreement when every rank of its process set has announced it or has joined.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "coordination/membership.h"
#include "coordination/plan.h"

namespace ringtrain {

class Ledger {
 public:
  // `membership` outlives this.
  explicit Ledger(const Membership& membership) : membership_(membership) {}

  // Before what is announced in it.
  void begin_round() { first_of_round_ = announcements_; }
  // `since`: when the rank submitted it.
  void announce(int rank, const Request& request, double since);
  // The process set is gone, and what was pending for it.
  void drop(int process_set);

  // What has become complete since the last call, in the order in which it was first announced; joins last.
  std::vector<Agreement> take_agreed();

  // Entries waited for longer than `limit_s`, as errors; they leave the ledger. None that is new in this round, in
  // which others may still have set a bit for it.
  std::vector<Agreement> take_stalled(double now, double limit_s);
  // A sentence for each entry that has waited for longer than `limit_s` and has not been reported yet.
  std::vector<std::string> take_warnings(double now, double limit_s);
  // Everything that is pending, as errors, since all ranks are blocked; it leaves the ledger.
  std::vector<Agreement> take_deadlocked();

  // When one of the two has something to say next, or infinity. A limit of 0 is never reached.
  double next_deadline(double warning_s, double shutdown_s) const;

  // The ranks that have joined a set cannot take part in this.
  static bool can_join(const Operation& operation);

 private:
  struct Entry {
    std::map<int, Request> announced;  // by rank
    double since = 0;
    uint64_t order = 0;
    bool has_warned = false;
  };
  struct Join {
    std::vector<int> ranks;  // in the order in which they joined
    int64_t unnamed = 0;     // the most operations without a name that any of them has submitted
  };

  void join(int rank, const Operation& operation);
  bool is_complete(const Key& key, const Entry& entry) const;
  bool has_joined(int process_set, int rank) const;
  Agreement agree(const Entry& entry) const;
  std::vector<Agreement> take_joins();
  std::string describe(const Key& key, const Entry& entry, double now) const;
  static std::string sites_text(const Entry& entry);
  std::string describe_deadlock() const;

  const Membership& membership_;
  std::map<Key, Entry> entries_;
  std::map<int, Join> joins_;  // by process set
  std::set<Key> changed_;      // entries to look at in take_agreed
  uint64_t announcements_ = 0;
  uint64_t first_of_round_ = 0;
};

}  // namespace ringtrain
