// The operations that ranks have announced in full. Kept by rank 0; the ledgers of other ranks stay empty.
//
// An entry becomes an Agreement when every rank of its process set has announced it or has joined. Until then it may
// stall. Its states, and what ends each of them:
//   pending  From the first announcement. In the round of that announcement other ranks may have set a bit for it
//            instead, so nothing is said of an entry that is new in this round. After Limits::ask_s it is
//   asked    All ranks have been asked where their threads are. When the ranks that have not announced it have
//            answered, or answer_s_ after the question, and not before Limits::warning_s, it is
//   told     A warning has named those ranks, or an earlier warning named the same ones. answer_s_ before
//            Limits::shutdown_s the ranks are asked again.
// From each state it leaves when it is complete, or as an error after Limits::shutdown_s.
// A join is an entry like any other, but for its age: an operation of its process set makes it pending again.
// An end of a message is an entry that is never complete: it ends as an error, or when its rank withdraws it, since the
// other end has come.
// A rank that has announced the barrier kEndName submits nothing more. Operations that wait for that rank fail at once.
//
// An entry keeps a request once for all ranks that have announced the same, not for each: the first step of N ranks
// with K operations, in one order, takes K requests, and N times K only where all of them differ.
//
// Tens of thousands of entries may be pending while the ranks go through as many rounds. So a round must not look at
// all of them: what it asks for is kept in order beside the entries, and it looks at all only when one is due.
#pragma once

#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "coordination/membership.h"
#include "coordination/operation.h"
#include "coordination/plan.h"
#include "coordination/rank_set.h"

namespace ringtrain {

// A request, and the ranks that have announced the same.
struct Variant {
  Request request;
  RankSet ranks;
};

// Compares the requests of one name. Returns "" if they fit together, else the message of the MismatchError.
std::string find_mismatch(const std::vector<Variant>& variants);

// Whether the agreed operation is the one that a rank asked for, except for fields that may differ between ranks.
bool are_alike(const Operation& agreed, const Operation& own);

class Ledger {
 public:
  // How long an operation may wait: until the ranks are asked, until a warning, and until an error, 0: never.
  struct Limits {
    double ask_s, warning_s, shutdown_s;
  };
  // `membership` outlives this.
  Ledger(const Membership& membership, const Limits& limits);

  // Called before the announcements of a round.
  void begin_round() { first_of_round_ = announcements_; }
  // `first_s`, `last_s`: when the first and the last of these ranks submitted it.
  void announce(const RankSet& ranks, const Request& request, double first_s, double last_s);
  // The other end of a message that was announced has come.
  void withdraw(const Key& message);
  // Forgets a removed process set, and what was pending for it.
  void drop(int process_set);

  // Returns what has become complete since the last call, or never can, in the order in which it was first announced;
  // joins last.
  std::vector<Agreement> take_agreed();

  // Whether some rank has joined and others have not. Then note_progress() is called for each operation that is agreed
  // on: a join waits for as long as the other ranks go on, and is overdue only when they do nothing.
  bool has_joins() const { return !joining_.empty(); }
  void note_progress(int process_set, double now);

  // Notes where the main thread of a rank is, its answer to the last question: "in load() at train.py:17".
  void note_answer(int rank, std::string whereabouts);

  // Returns the reason to ask all ranks where their threads are, such as "allreduce "a" waits for rank 1", if an entry
  // is due for it, else "". Requires that take_agreed() has been called in this round.
  std::string take_question(double now);
  // Returns a warning for each group of entries that wait for the same ranks, if one of the group is due.
  std::vector<std::string> take_warnings(double now);
  // Takes entries older than Limits::shutdown_s, as errors, but none that is new in this round.
  std::vector<Agreement> take_stalled(double now);
  // Takes everything that is pending, as errors. Called when all ranks are blocked.
  std::vector<Agreement> take_deadlocked();

  // When a question, a warning or an error is due next, or infinity.
  double next_deadline() const { return due_.empty() ? kNever : due_.begin()->first; }

  // Whether ranks that have joined the set can take part, with zeros.
  static bool can_join(const Operation& operation);

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  struct Entry {
    std::vector<Variant> variants;
    size_t first = 0;   // the variant of the lowest rank
    RankSet announced;  // by these ranks, in any variant
    double since = 0;   // a join: when the last rank joined, or an operation was agreed on after that
    uint64_t order = 0;
    int last = 0;        // a rank that announced it last
    int questions = 0;   // that were asked for it
    double asked_s = 0;  // for the first time
    bool is_told = false;
    double due_s = kNever;  // as in due_
  };
  using Entries = std::map<Key, Entry>;

  static const Request& request_of(const Entry& entry) { return entry.variants[entry.first].request; }
  static const Operation& first_of(const Entry& entry) { return request_of(entry).operation; }
  static void add_variant(Entry& entry, const RankSet& ranks, const Request& request);
  void note_change_of(int process_set);
  // Called when an entry has changed.
  void reschedule(const Key& key, Entry& entry);
  Entries::iterator erase(Entries::iterator it);
  // Those that have to announce it, ascending; made in `own` where they are not those of a process set.
  const std::vector<int>& members_of(const Entry& entry, std::vector<int>& own) const;
  bool is_complete(const Key& key, const Entry& entry) const;
  RankSet ended_members(const Key& key, const Entry& entry) const;  // that will never announce it
  Agreement agree(const Entry& entry) const;
  static Agreement agree_on_join(const Entry& entry);
  std::vector<std::vector<int64_t>> rows_of(const Entry& entry) const;
  static Agreement failed(const Entry& entry, ErrorKind error, std::string message);
  static Agreement refuse(const Entry& entry, const RankSet& ended);
  bool is_new(const Entry& entry) const { return entry.order >= first_of_round_; }
  double next_question(const Entry& entry) const;
  double next_warning(const Entry& entry) const;
  bool have_answered(const RankSet& ranks) const;
  RankSet missing(const Key& key, const Entry& entry) const;
  std::string describe(const Key& key, const Entry& entry, double now) const;
  std::string missing_text(const RankSet& ranks) const;
  static std::string unordered_text(const Entry& entry);
  static std::string sites_text(const Entry& entry);
  using Groups = std::map<RankSet, std::vector<Entries::const_iterator>>;
  Groups groups_of_ranks() const;
  std::string describe_deadlock() const;
  static std::string deadlock_hint(const Groups& groups);

  const Membership& membership_;
  const Limits limits_;
  const double answer_s_;  // how long rank 0 waits for answers before it warns without them
  Entries entries_;
  std::set<Key> changed_;                        // entries to look at in take_agreed
  std::set<std::pair<double, const Key*>> due_;  // when the next question, warning or error of an entry is due
  std::set<int> joining_;                        // process sets with an entry of a join
  bool has_new_answers_ = false;                 // since take_warnings
  uint64_t announcements_ = 0;
  uint64_t first_of_round_ = 0;
  double question_s_;                   // when the ranks were asked last
  RankSet answered_;                    // ranks that have answered that question
  std::map<int, std::string> answers_;  // the last one of each rank
};

}  // namespace ringtrain
