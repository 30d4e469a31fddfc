// Threads of simulated ranks, run one at a time in virtual time: the seed decides which one goes on.
//
// A fibre runs until it waits. Then another fibre whose condition holds, or whose deadline has passed, is drawn; if
// there is none, time jumps to the next event. A rank may be stopped (its fibres do not run until a given time, as
// after SIGSTOP and SIGCONT) or killed (its fibres unwind at once). Each rank reads a clock of its own, which may be
// off.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <functional>
#include <limits>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "story.h"

namespace ringtrain::simulation {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Thrown out of a wait on a killed rank; its fibres let it pass.
struct Killed {};

class Fibres {
 public:
  // `story` and `random` outlive this. One per thread at a time.
  Fibres(Story& story, Random& random, int ranks);
  ~Fibres();
  Fibres(const Fibres&) = delete;
  Fibres& operator=(const Fibres&) = delete;

  // Before run(), or by a fibre. `role`: for the trace.
  void start(int rank, std::string role, std::function<void()> body);
  // Calls `action` at this time, outside of all fibres.
  void at(double time, std::function<void()> action);
  // Asks all conditions at this time.
  void look_at(double time) { looks_.push(time); }
  // Runs until nothing can happen any more or this time has come.
  void run(double until);

  // By a fibre: returns when `is_ready`, or at `deadline`. Conditions are asked after each event, so they are cheap and
  // change nothing.
  void wait(std::function<bool()> is_ready, double deadline = kNever);
  void pause(double seconds);

  // Unwinds all fibres that still wait, so that what they own is freed.
  void end();

  double now() const { return now_; }
  // Whether a fibre of a living rank runs now, which may wait.
  bool is_running() const { return running_ && !is_killed(running_->rank); }
  int running_rank() const;  // -1 outside of fibres
  const char* running_role() const;

  void set_clock_offset(int rank, double seconds) { ranks_[static_cast<size_t>(rank)].clock_offset = seconds; }
  double clock_of(int rank) const { return now_ + ranks_[static_cast<size_t>(rank)].clock_offset; }
  void stop(int rank, double until) { ranks_[static_cast<size_t>(rank)].stopped_until = until; }
  void kill(int rank) { ranks_[static_cast<size_t>(rank)].is_killed = true; }
  bool is_killed(int rank) const { return ranks_[static_cast<size_t>(rank)].is_killed; }
  bool is_stopped(int rank) const { return was_stopped_since(rank, now_); }
  bool was_stopped_since(int rank, double time) const { return ranks_[static_cast<size_t>(rank)].stopped_until > time; }

  static Fibres& current();

 private:
  struct Fibre {
    ucontext_t context;  // where it begins
    jmp_buf place;       // where it goes on
    bool has_begun = false;
    std::unique_ptr<char[]> stack;
    std::function<void()> body;
    std::function<bool()> is_ready;
    double deadline = 0;
    int rank = 0;
    std::string role;
    bool has_ended = false;
  };
  struct Rank {
    double clock_offset = 0, stopped_until = 0;
    bool is_killed = false;
  };
  struct Action {
    double time;
    uint64_t order;
    std::function<void()> call;
    bool operator<(const Action& other) const { return time != other.time ? time > other.time : order > other.order; }
  };

  static void enter();
  void resume(Fibre& fibre);
  void give_way(Fibre& self);
  bool can_go_on(const Fibre& fibre) const;
  double next_time() const;

  Story& story_;
  Random& random_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<Fibre>> fibres_;
  std::priority_queue<Action> actions_;
  uint64_t action_count_ = 0;
  std::priority_queue<double, std::vector<double>, std::greater<>> looks_;
  std::vector<size_t> ready_;  // of run(), kept to allocate it once
  jmp_buf scheduler_;
  Fibre* running_ = nullptr;
  double now_ = 0;
};

}  // namespace ringtrain::simulation
