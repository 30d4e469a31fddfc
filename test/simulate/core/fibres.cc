#include "fibres.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace ringtrain {

double now_s() {
  const simulation::Fibres& fibres = simulation::Fibres::current();
  const int rank = fibres.running_rank();
  if (rank < 0) return fibres.now();
  // Destructors of a killed rank may wait for a time to pass, which does not pass for it.
  static double after_death_s = 0;
  return fibres.is_killed(rank) ? after_death_s += 1000 : fibres.clock_of(rank);
}

namespace simulation {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr uint64_t kMostEvents = 2000000;
Fibres* the_fibres = nullptr;
// Stacks of stories that are over: memory that is mapped already.
std::vector<std::unique_ptr<char[]>> free_stacks;

}  // namespace

Fibres& Fibres::current() { return *the_fibres; }

Fibres::Fibres(Story& story, Random& random, int ranks)
    : story_(story), random_(random), ranks_(static_cast<size_t>(ranks)) {
  the_fibres = this;
}

Fibres::~Fibres() {
  end();
  the_fibres = nullptr;
}

void Fibres::end() {
  for (Rank& rank : ranks_) {
    rank.is_killed = true;
    rank.stopped_until = 0;
  }
  for (const auto& fibre : fibres_) {
    while (!fibre->has_ended) resume(*fibre);
    free_stacks.push_back(std::move(fibre->stack));
  }
  fibres_.clear();
  running_ = nullptr;
}

int Fibres::running_rank() const { return running_ ? running_->rank : -1; }
const char* Fibres::running_role() const { return running_ ? running_->role.c_str() : ""; }

void Fibres::enter() {
  Fibres& fibres = current();
  Fibre& self = *fibres.running_;
  if (!fibres.is_killed(self.rank)) {
    try {
      self.body();
    } catch (const Killed&) {
    }
  }
  self.has_ended = true;
  _longjmp(fibres.scheduler_, 1);
}

// swapcontext() makes a system call each time, to keep the mask of signals, which no fibre changes.
void Fibres::resume(Fibre& fibre) {
  running_ = &fibre;
  if (_setjmp(scheduler_) == 0) {
    if (std::exchange(fibre.has_begun, true)) _longjmp(fibre.place, 1);
    setcontext(&fibre.context);
  }
  running_ = nullptr;
}

void Fibres::give_way(Fibre& self) {
  if (_setjmp(self.place) == 0) _longjmp(scheduler_, 1);
}

void Fibres::start(int rank, std::string role, std::function<void()> body) {
  auto fibre = std::make_unique<Fibre>();
  if (free_stacks.empty()) {
    fibre->stack.reset(new char[kStackBytes]);
  } else {
    fibre->stack = std::move(free_stacks.back());
    free_stacks.pop_back();
  }
  fibre->rank = rank;
  fibre->role = std::move(role);
  fibre->body = std::move(body);
  fibre->deadline = now_;
  getcontext(&fibre->context);
  fibre->context.uc_stack.ss_sp = fibre->stack.get();
  fibre->context.uc_stack.ss_size = kStackBytes;
  fibre->context.uc_link = nullptr;
  makecontext(&fibre->context, &Fibres::enter, 0);
  fibres_.push_back(std::move(fibre));
}

void Fibres::at(double time, std::function<void()> action) {
  actions_.push({time, action_count_++, std::move(action)});
}

bool Fibres::can_go_on(const Fibre& fibre) const {
  if (fibre.has_ended) return false;
  const Rank& rank = ranks_[static_cast<size_t>(fibre.rank)];
  if (rank.is_killed) return true;
  if (rank.stopped_until > now_) return false;
  return fibre.deadline <= now_ || (fibre.is_ready && fibre.is_ready());
}

double Fibres::next_time() const {
  double next = actions_.empty() ? kNever : actions_.top().time;
  if (!looks_.empty()) next = std::min(next, looks_.top());
  for (const auto& fibre : fibres_) {
    if (fibre->has_ended) continue;
    const double stopped_until = ranks_[static_cast<size_t>(fibre->rank)].stopped_until;
    // A stopped fibre may have become ready meanwhile.
    next = std::min(next, stopped_until > now_ ? stopped_until : std::max(fibre->deadline, stopped_until));
  }
  return next;
}

void Fibres::run(double until) {
  while (true) {
    while (!actions_.empty() && actions_.top().time <= now_) {
      const std::function<void()> call = actions_.top().call;
      actions_.pop();
      call();
    }
    while (!looks_.empty() && looks_.top() <= now_) looks_.pop();
    ready_.clear();
    for (size_t i = 0; i < fibres_.size(); ++i)
      if (can_go_on(*fibres_[i])) ready_.push_back(i);
    if (ready_.empty()) {
      const double next = next_time();
      if (next == kNever || next > until) return;
      now_ = std::max(now_, next);
      continue;
    }
    Fibre& next = *fibres_[random_.one_of(ready_)];
    if (++story_.events > kMostEvents) return story_.find("no end of events: some rank goes on without waiting");
    story_.mix(static_cast<uint64_t>(next.rank) * 8 + static_cast<uint64_t>(now_ * 1e9) * 1024);
    resume(next);
  }
}

void Fibres::wait(std::function<bool()> is_ready, double deadline) {
  Fibre& self = *running_;
  self.is_ready = std::move(is_ready);
  self.deadline = deadline;
  give_way(self);
  if (is_killed(self.rank)) throw Killed();
}

void Fibres::pause(double seconds) { wait(nullptr, now_ + seconds); }

}  // namespace simulation
}  // namespace ringtrain
