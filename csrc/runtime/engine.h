// One per process at a time: owns everything of the core but Resources, the lanes in which the work is done, one for
// the world and one for each process set (lane.h), and the messages between two ranks (mail.h).
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/options.h"
#include "base/thread_annotations.h"
#include "coordination/blockage.h"
#include "coordination/coordinator.h"
#include "runtime/executor.h"
#include "runtime/fabric.h"
#include "runtime/gpus.h"
#include "runtime/inbox.h"
#include "runtime/lane.h"
#include "runtime/lookout.h"
#include "runtime/mail.h"
#include "runtime/process_sets.h"
#include "runtime/resources.h"
#include "runtime/waiting_callers.h"

namespace ringtrain {

class Engine final : private Lane::Owner {
 public:
  using Interrupt = ringtrain::Interrupt;

  // All ranks of the world at the same time. Throws what made it impossible.
  Engine(World world, Options options, std::shared_ptr<Resources> resources);
  // As shutdown().
  ~Engine() override;

  // Any thread. Wakes nobody if the caller is going to wait for the Handle at once.
  enum class Caller { goes_on, waits };
  std::shared_ptr<Handle> submit(SubmissionPtr submission, Caller caller);
  // Any thread: whether it is done, after at most `timeout_s`, or a little later if that falls into an operation. If an
  // operation makes no progress and `give_up_s` are over, the engine fails with a StalledError: in the middle of one
  // nobody can leave without taking the others with him.
  bool wait(Handle& handle, double timeout_s, const Interrupt& is_interrupted,
            double give_up_s = std::numeric_limits<double>::infinity());
  // Any thread. Of messages that it carries itself, see Mail.
  bool begin(const DirectEnds& ends);
  void carry(const DirectEnds& ends) { mail_->carry(ends); }
  void hand_over(const DirectEnds& ends) { mail_->hand_over(ends); }
  // Any thread. This rank's GPU, if it is that one; see Gpus::use.
  GpuPtr gpu(int ordinal) { return gpus_.use(ordinal); }
  std::shared_ptr<char> allocate_on_gpu(int ordinal, size_t bytes) { return gpus_.allocate(ordinal, bytes); }
  // Any thread. Memory for the user's arrays that all ranks of the node can reach, or null where there is none.
  std::shared_ptr<Arena> arena() const { return fabric_.arena(); }
  // Any thread. A file of what this rank does from now on, until stop_timeline(). Throws if it cannot be written.
  void start_timeline(Timeline::Setup setup);
  void stop_timeline() { inbox_.set_timeline(nullptr); }
  void mark(const std::string& text);  // in the timeline, if there is one
  // Any thread. Sets what all threads of this rank that could submit something wait for; nothing if one does not wait.
  void say_blocked(std::vector<std::shared_ptr<Handle>> awaited);
  // Any thread. Has `ask` called when a rank asks all of them where their threads are, since an operation waits for
  // long: on a thread that has the turn, so it must not wait. Its argument says what waits for which ranks.
  void on_question(std::function<void(const std::string&)> ask);
  // Any thread. The answer of this rank: "in load() at train.py:17".
  void answer(const std::string& whereabouts);
  // Any thread. The last operations, and sums over all of them.
  std::vector<std::pair<SubmissionPtr, Progress>> last_operations() { return inbox_.last_operations(); }
  // Any thread. The last one that has ended, if there is one, then those that have not.
  std::vector<std::pair<SubmissionPtr, Progress>> present_operations() { return inbox_.last_operations(1); }
  // Any thread. The ranks of each process set that this rank belongs to, but for the world.
  std::map<int, std::vector<int>> process_sets();
  TotalsOfKinds totals() { return inbox_.totals(); }
  // Of all lanes, also those that have ended.
  Coordinator::Counts counts();
  // How many of these rounds no other node took part in, those of lanes of ranks of this node.
  uint64_t rounds_on_node();
  // Any thread. How long callers have waited for Handles so far, summed over their threads.
  double exposed_s() const { return static_cast<double>(exposed_ns_) * 1e-9; }
  // Any thread. In the world.
  int rank() const { return world_.rank; }
  // Any thread. On how many nodes these ranks are.
  int node_count(const std::vector<int>& ranks) const {
    return static_cast<int>(world_.place(ranks).distinct_nodes().size());
  }
  // Leaves the job: operations that other ranks still wait for fail there. Returns when all threads have ended.
  void shutdown();
  // Any thread. This rank cannot go on: all others get a RemoteError that names it and gives the reason. The first
  // reason counts, so nothing happens if the engine has ended already. Returns when they were told, after `timeout_s`
  // at most.
  void report_failure(const std::string& reason, double timeout_s);
  // Any thread. Somebody who knows better than the network says that another rank is gone: all that waits here fails.
  void report_loss(const std::string& text);
  // Whether it has ended because of an error, its own or that of another rank.
  bool has_failed() const { return has_failed_; }

 private:
  // By process set; that of the world is first.
  using Lanes = std::vector<std::shared_ptr<Lane>>;
  class OtherLanes;

  // ---- of the lanes
  void open(int process_set) override REQUIRES(turn);
  void close(int process_set, ErrorKind kind, const std::string& why) override REQUIRES(turn);
  void ask(const std::string& question) override REQUIRES(turn);
  void has_ended(Lane& lane, const std::vector<int>& left) override REQUIRES(turn);
  void end_lanes() override REQUIRES(turn) { end_lanes(world_lane_->members()); }
  void found(const std::string& findings) override { resources_->set_findings(findings); }
  void fail(const Error& error) override REQUIRES(turn);
  void tell_failure(const Error& error) REQUIRES(turn);
  void is_about_to_pause() override { lookout_.hand_over(); }

  // On the lookout, until another thread is there.
  void look_out();
  void step_down(Workplace& place);
  // Where a thread on the lookout works.
  using Places = std::vector<Workplace*>;
  // Whether there is something to do.
  bool spin(const Places& places, uint32_t seen);
  std::optional<double> lie_down(const Places& places);

  void submit_ends(const Submission& end);
  Lane::Shared shared();
  // Any thread.
  std::shared_ptr<const Lanes> lanes();
  std::shared_ptr<Lane> lane_of(int process_set);
  template <typename Do>
  void with_place_of(const Handle& handle, Do act);
  void change_lanes(const std::function<void(Lanes&)>& change);

  void retire(Lane& lane) REQUIRES(turn);
  // Those with one of these ranks, but for that of the world.
  void end_lanes(const std::vector<int>& of_ranks) REQUIRES(turn);
  // The next rounds of all lanes say that this rank leaves.
  void leave_lanes();
  void end_world(const std::vector<int>& left) REQUIRES(turn);
  void end_set(int process_set, const std::vector<int>& left) REQUIRES(turn);
  void end() REQUIRES(turn);
  std::string end_text(const std::vector<int>& left) const;
  std::string names_text(const std::vector<int>& ranks) const;

  // In the node's Arena, or on a GPU in memory of NCCL.
  bool is_registered(const Submission& submission);

  // Constant after construction.
  const World world_;
  const Options options_;
  const bool shares_cores_;                     // with other threads of this node's ranks
  const std::shared_ptr<Resources> resources_;  // shared with the Engines before and after this one

  // Any thread.
  Inbox inbox_;
  std::atomic<bool> is_leaving_{false};
  std::atomic<bool> has_ended_{false};
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_closed_{false};  // has ended, and all that can be told has been told
  Mutex question_mutex_;
  std::function<void(const std::string&)> ask_ GUARDED_BY(question_mutex_);
  std::atomic<uint64_t> exposed_ns_{0};
  Attention attention_;

  TurnMutex turn_;
  std::unique_lock<TurnMutex> beginning_{turn_};  // until the end of the constructor
  Tuning tuning_ GUARDED_BY(turn);                // of the world
  // Any thread asks these, too, as their functions allow.
  Fabric fabric_;
  ProcessSets sets_ GUARDED_BY(turn);
  Gpus gpus_;
  Blockage blockage_;
  BlockedThreads blocked_;
  Residuals residuals_ GUARDED_BY(turn);
  std::unique_ptr<Mail> mail_;  // constant after construction

  Mutex lanes_mutex_;
  std::shared_ptr<const Lanes> lanes_ GUARDED_BY(lanes_mutex_);  // never changed, but replaced
  std::shared_ptr<Lane> world_lane_;                             // constant after construction
  std::vector<int> left_ GUARDED_BY(turn);                       // the first ranks that have left the job
  // Lanes that have ended, until nobody else has them: with the turn they are destroyed.
  std::vector<std::shared_ptr<Lane>> ended_ GUARDED_BY(turn);
  std::map<int, std::vector<int>> ranks_of_sets_ GUARDED_BY(lanes_mutex_);
  Coordinator::Counts counts_of_ended_ GUARDED_BY(lanes_mutex_) = {};
  uint64_t rounds_on_node_of_ended_ GUARDED_BY(lanes_mutex_) = 0;

  // On the lookout only.
  Waiter own_waiter_;

  Lookout lookout_;
};

// The one Engine of this process, for every language that submits.
//
// Any thread. Null before init(), after shutdown() and in a forked child. Kept for the length of a call only: the
// thread that lets go of it last takes leave of the other ranks.
std::shared_ptr<Engine> current_engine();
// The same, or the one that is taking leave of the other ranks.
std::shared_ptr<Engine> current_or_leaving_engine();
// As current_engine(), but throws Error(not_initialized).
std::shared_ptr<Engine> require_engine();
// The result of the Autotune of an Engine of this process. Any thread.
std::string autotune_findings();

// Throws in a process that was forked from a rank. To be called before it meets the others: connections and MPI are
// still those of its parent.
void require_not_forked();
// All ranks of the world at the same time. Throws what made it impossible, as in a process that was forked from a rank.
void start_engine(World world, Options options);
// Leaves the job and ends the Engine, if there is one. Returns whether all was well until then. `by` is for the message
// of later calls: "shutdown() at train.py:40".
bool shut_down_engine(const std::string& by);

}  // namespace ringtrain
