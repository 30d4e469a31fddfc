// Submissions that the engine has not finished: the only state that callers share with it.
//
// Holds views: the submitter keeps the memory until its Handle is done. Operations without a name take one of a fixed
// number of names in turn, so that repeated ones can be cached like any other; the one after next of the same name
// waits here until the one before it is finished, so each name is used in the same order on every rank.
//
// That order is the script's only while one thread submits them. An operation submitted without a name while another
// thread waits for such an operation could as well have come first, on this rank or on another one: it fails on all
// ranks that take part. Where the other thread goes on after submitting, it may have had the order from the script, as
// when it starts the second thread afterwards: that is warned of, once.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/thread_annotations.h"
#include "coordination/coordinator.h"
#include "coordination/plan.h"
#include "record/submission.h"
#include "record/timeline.h"

namespace ringtrain {

// Sums over all operations of one kind that have ended.
struct Totals {
  uint64_t operations = 0, failed = 0, bytes = 0;
  // Seconds, summed over the operations: until it was announced, until all ranks were ready, until its turn came, and
  // while it was carried out.
  double queued_s = 0, waiting_s = 0, ready_s = 0, working_s = 0;
};
using TotalsOfKinds = std::map<std::string, Totals, std::less<>>;  // by kind_of()

// The last operations of this rank, and sums over all of them. Guarded by the Inbox. Keeps neither results nor memory
// of the user.
class History {
 public:
  // The one that it keeps no longer for that, or null.
  SubmissionPtr add(SubmissionPtr submission);
  static constexpr size_t kCapacity = 1024;
  // The last that have ended, at most so many, in this order.
  std::vector<SubmissionPtr> last(size_t most) const;
  const TotalsOfKinds& totals() const { return totals_; }

 private:
  std::vector<SubmissionPtr> ring_;
  size_t next_ = 0;  // to be overwritten, once the ring is full
  TotalsOfKinds totals_;
};

// Submissions for one lane that the lane has not taken yet. Changed by the Inbox.
class Arrivals {
 public:
  // Any thread.
  bool has_new() const { return has_new_.load(std::memory_order_acquire); }

 private:
  friend class Inbox;
  std::vector<SubmissionPtr> new_;
  std::atomic<bool> has_new_{false};
};

class Inbox {
 public:
  // Whether there are other ranks, for which the order of what has no name matters.
  explicit Inbox(bool has_peers) : has_peers_(has_peers) {}

  // Any thread. Throws Error(invalid) for a name that is in flight for the same kind of operation or a process set that
  // this rank cannot use, and the error of close() after that. Different kinds may share a name, as in Horovod: the
  // later one waits here for the earlier one, so that ranks that confuse them are still told. So does one of the same
  // kind that needs it.
  std::shared_ptr<Handle> add(SubmissionPtr submission);
  // The same for a message that its caller has begun itself.
  void add_begun(const SubmissionPtr& message) REQUIRES(turn);
  // A message of so many bytes has come and gone without a Submission: it is counted, and nothing else.
  void note_direct(size_t bytes) REQUIRES(turn) {
    direct_messages_.store(direct_messages_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    direct_bytes_.store(direct_bytes_.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  }
  // Any thread. Whether there are messages between two ranks to take, which go to one place, whatever their process
  // set.
  bool has_new_messages() const { return messages_.has_new(); }
  // How many were ever added.
  uint64_t added() const { return added_.load(std::memory_order_relaxed); }
  // The last operations that have ended, at most so many, then those that have not, in the order of submission.
  std::vector<std::pair<SubmissionPtr, Progress>> last_operations(size_t most_ended = History::kCapacity);
  // Some of those that have not ended, and where they were submitted, in words.
  std::string pending_text();
  TotalsOfKinds totals();
  // The Timeline that gets every operation that ends, or null.
  void set_timeline(std::shared_ptr<Timeline> timeline);
  std::shared_ptr<Timeline> timeline();  // null without one
  bool has_timeline() const { return has_timeline_.load(std::memory_order_relaxed); }

  // Into `fresh`, instead of what is there.
  void take_new(Arrivals& arrivals, std::vector<Fresh>& fresh, double now) REQUIRES(turn);
  void take_new_messages(std::vector<SubmissionPtr>& fresh, double now) REQUIRES(turn);
  // Of a message: both ends are ready.
  void note_begun(Submission& message, double now) REQUIRES(turn);
  // Returns what `rank`, this one, has submitted for every part of the plan; null where it has joined, or has nothing.
  // Notes that `group` begins with it, and when it was agreed on.
  std::vector<SubmissionPtr> find(const Plan& plan, int rank, double agreed_s, double now, const char* group)
      REQUIRES(turn);
  // The thread that carried them out (but for nulls) has met an error.
  void give_up(const std::vector<SubmissionPtr>& submissions) REQUIRES(turn);
  // Forgets them (but for nulls), so that their names may be used again. Before their Handles are finished. Returns
  // when they have ended.
  double remove(const std::vector<SubmissionPtr>& submissions, ErrorKind error = ErrorKind::none) REQUIRES(turn);

  // This rank may use a process set, and what it submits goes to `arrivals` from now on, which outlives this.
  void allow(int process_set, Arrivals& arrivals) REQUIRES(turn);
  // Fails what is pending for it; `why`: what has become of it, for messages.
  void forbid(int process_set, ErrorKind kind, const std::string& why) REQUIRES(turn);
  void set_unnamed(int process_set, int64_t count) REQUIRES(turn);
  void restart_unnamed() REQUIRES(turn);  // counts from 0 in every process set

  // Fails what is pending for a process set and what will be submitted for it.
  void end(int process_set, const Error& error) REQUIRES(turn);
  // Fails all that is pending and all that will be submitted, with the error of the first call. An operation that is
  // under way is left to its thread, which still uses the memory: that calls this again when it has met the error, too.
  void close(const Error& error) REQUIRES(turn);

 private:
  // Unfinished submissions of a thread without names.
  struct OfThread {
    std::thread::id thread;
    int in_flight = 0, awaited = 0;
    std::shared_ptr<const std::string> site;  // of the last; may be null
  };

  // Operations of a process set without names.
  struct Unnamed {
    int64_t count = 0;  // so far
    // By the place of the name: the last request without a name, and the same with it, to be shared if the first is
    // submitted again.
    std::vector<std::pair<std::shared_ptr<Request>, std::shared_ptr<Request>>> named;
  };

  void enter(Submission& submission) REQUIRES(mutex_);
  template <typename Take>
  void take(Arrivals& arrivals, double now, Take take);
  void name_it(Submission& submission) REQUIRES(mutex_);
  void note_unnamed(Submission& submission) REQUIRES(mutex_);
  void forget_unnamed(const Submission& submission) REQUIRES(mutex_);
  void warn_of_order(const Submission& submission, const OfThread& other) REQUIRES(mutex_);
  bool has_twin(const Operation& operation) const REQUIRES(mutex_);  // of one whose name is in flight
  void announce(const SubmissionPtr& submission) REQUIRES(mutex_);
  void remove(const SubmissionPtr& submission) REQUIRES(mutex_);
  // Returns the entry that leaves the history for it, or null.
  SubmissionPtr end(const SubmissionPtr& submission, ErrorKind error, double now) REQUIRES(mutex_);
  void let_in_who_waits(const Key& key) REQUIRES(mutex_);
  bool has_waiting(int process_set) const REQUIRES(mutex_);
  std::vector<SubmissionPtr> take_pending(std::optional<int> process_set, ErrorKind error) REQUIRES(mutex_);

  const bool has_peers_;
  std::atomic<bool> has_timeline_{false};  // these change under mutex_
  std::atomic<uint64_t> added_{0};
  std::atomic<uint64_t> direct_messages_{0}, direct_bytes_{0};

  Mutex mutex_;
  Arrivals messages_;
  // The names live in the submissions.
  std::unordered_map<KeyView, SubmissionPtr, HashOfKey> in_flight_ GUARDED_BY(mutex_);
  // Without a name of their own, of another kind or willing to wait, while their name is in flight. A join is announced
  // after all of its process set.
  std::map<Key, std::deque<SubmissionPtr>> waiting_ GUARDED_BY(mutex_);
  History history_ GUARDED_BY(mutex_);
  std::shared_ptr<Timeline> timeline_ GUARDED_BY(mutex_);
  std::map<int, Unnamed> unnamed_ GUARDED_BY(mutex_);                           // by process set
  std::map<int, std::vector<OfThread>> unnamed_of_threads_ GUARDED_BY(mutex_);  // by process set
  bool has_warned_of_order_ GUARDED_BY(mutex_) = false;
  std::map<int, Arrivals*> allowed_ GUARDED_BY(mutex_);  // by process set
  std::map<int, Error> ended_ GUARDED_BY(mutex_);        // by process set
  std::optional<Error> closed_with_ GUARDED_BY(mutex_);
};

}  // namespace ringtrain
