#include "kvstore/worker/direct_path.h"

#include <sched.h>

#include <algorithm>

#include "base/clock.h"
#include "base/wait.h"

namespace ringtrain {
namespace {

bool is_synchronous(const DirectItem& item) { return item.actor->part().spec().is_synchronous; }

// Whether a push of several chunks would stay in parts if this process died in between. Memory that is not shared dies
// with the process. Synchronous and atomic stores have no room for it.
bool needs_stage(const DirectItem& item) {
  const Part& part = item.actor->part();
  return item.source.values && part.layout().stage_bytes() > 0 && item.actor->shared_part()->memory().is_shared();
}

std::vector<Actor*> actors_of(const std::vector<DirectItem>& items) {
  std::set<Actor*> actors;
  for (const DirectItem& item : items) actors.insert(item.actor);
  return {actors.begin(), actors.end()};
}

// At a server that is away.
constexpr double kBetweenLooks_s = 2e-3;

// Spins a little, then lets others have the processor.
void pause(int times) {
  constexpr int kSpins = 200;
  if (times < kSpins)
    relax();
  else
    sched_yield();
}

}  // namespace

// The pushes of a worker are staged one after the other, in the order in which they count. Where the push before this
// one has failed, the turn begins after timeout_s, and begin_all() raises the error.
class DirectPath::StageTurn {
 public:
  StageTurn(DirectPath& path, const std::vector<DirectItem>& items, Interrupt interrupt) : path_(path) {
    const double end = now_s() + path.timeout_s_;
    for (int times = 0; !take(items, now_s() > end); ++times) {
      pause(times);
      if (times % 64 == 63) interrupt();
    }
  }
  ~StageTurn() {
    const Lock lock(path_.mutex_);
    path_.is_staging_ = false;
  }
  StageTurn(const StageTurn&) = delete;
  StageTurn& operator=(const StageTurn&) = delete;

 private:
  bool take(const std::vector<DirectItem>& items, bool is_late) EXCLUDES(path_.mutex_) {
    const Lock lock(path_.mutex_);
    if (path_.ended_) throw Error(*path_.ended_);
    const DirectItem& first = items.front();
    const uint64_t before = first.actor->pushes_of(first.chunk, static_cast<size_t>(path_.worker_));
    if (path_.is_staging_ || (before + 1 < first.pushes() && !is_late)) return false;
    return path_.is_staging_ = true;
  }

  DirectPath& path_;
};

// Rounds: workers go through groups of as many chunks as there are workers, each from another one on, so that they all
// come to a group together, and each closes its share. Without rounds each begins elsewhere.
std::vector<size_t> DirectPath::order_of(const std::vector<DirectItem>& items) const {
  const auto worker = static_cast<size_t>(worker_), workers = static_cast<size_t>(workers_);
  std::vector<size_t> order;
  order.reserve(items.size());
  if (items.empty() || !is_synchronous(items.front())) {
    for (size_t i = 0; i < items.size(); ++i) order.push_back((i + worker * items.size() / workers) % items.size());
    return order;
  }
  for (size_t begin = 0; begin < items.size(); begin += workers)
    for (size_t i = 0; i < workers; ++i)
      if (const size_t place = begin + (worker + i) % workers; place < items.size()) order.push_back(place);
  return order;
}

std::vector<DirectItem> DirectPath::carry_out(std::vector<DirectItem> items, const StoreHandle& handle,
                                              Interrupt interrupt) {
  const KeptDenormals kept;
  std::vector<DirectItem> left_behind;
  try {
    for (Group& group : groups_of(std::move(items))) {
      std::optional<StageTurn> turn;
      if (group.is_staged) {
        turn.emplace(*this, group.items, interrupt);
        stage(group.items);
      }
      begin_in_order(group.items, left_behind, interrupt);
    }
    return left_behind;
  } catch (...) {
    const Lock lock(mutex_);
    const auto is_of_it = [&](const DirectItem& item) { return item.handle.get() == &handle; };
    open_.erase(std::remove_if(open_.begin(), open_.end(), is_of_it), open_.end());
    throw;
  }
}

// Returns a group for each piece of a key whose push is staged, and one group for all others. Each worker begins with
// another one.
std::vector<DirectPath::Group> DirectPath::groups_of(std::vector<DirectItem> items) const {
  std::vector<Group> groups(1);
  for (size_t first = 0, last = 0; first < items.size(); first = last) {
    const auto is_other = [&](const DirectItem& item) { return item.operation != items[first].operation; };
    const auto begin = items.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = std::find_if(begin, items.end(), is_other);
    last = static_cast<size_t>(end - items.begin());
    const bool is_staged = last - first > 1 && needs_stage(items[first]);
    if (is_staged) groups.push_back({true});
    std::vector<DirectItem>& group = is_staged ? groups.back().items : groups.front().items;
    group.insert(group.end(), std::make_move_iterator(begin), std::make_move_iterator(end));
  }
  const size_t turned = static_cast<size_t>(worker_) * groups.size() / static_cast<size_t>(workers_);
  std::rotate(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(turned % groups.size()), groups.end());
  return groups;
}

bool DirectPath::has_left(const DirectItem& item) {
  const Lock lock(mutex_);
  return left_.count(item.actor) > 0;
}

// Of one piece. Where another server has taken the place of its own, that one gets the push as a whole.
void DirectPath::stage(const std::vector<DirectItem>& items) {
  const DirectItem& first = items.front();
  if (has_left(first)) return;
  std::vector<const ElementRanges*> ranges;
  for (const DirectItem& item : items)
    if (item.source.ranges) ranges.push_back(item.source.ranges);
  const size_t piece = first.actor->part().chunk(first.chunk).piece;
  first.actor->stage(piece, first.pushes(), first.source, {first.operation->lr, first.operation->wd}, ranges);
  first.actor->publish();
}

void DirectPath::begin_in_order(std::vector<DirectItem>& items, std::vector<DirectItem>& left_behind,
                                Interrupt interrupt) {
  const std::vector<size_t> order = order_of(items);
  const std::vector<Actor*> actors = actors_of(items);
  const size_t at_once = std::max(static_cast<size_t>(workers_), size_t{4});
  std::vector<size_t> chosen;
  for (size_t next = 0; next < order.size();) {
    for (const size_t end = std::min(next + at_once, order.size()); next < end; ++next) chosen.push_back(order[next]);
    begin_all(items, chosen, left_behind);
    let_others_come(actors);
  }
  Standstill standstill;
  for (int times = 0; !chosen.empty(); ++times) {
    begin_all(items, chosen, left_behind);
    const bool waits_for_server = !chosen.empty() && items[chosen.front()].waits_for_server;
    if (waits_for_server)
      Waiter::nap(kBetweenLooks_s);
    else
      pause(times);
    if (chosen.empty() || (times % 64 != 63 && !waits_for_server)) continue;
    interrupt();
    DirectItem& item = items[chosen.front()];
    if (!waits_for_server) require_progress(item, standstill.waited_s(item.actor->part(), item.chunk));
  }
}

// An update takes no time, but another worker may come late for a good reason.
void DirectPath::require_progress(DirectItem& item, double waited_s) const {
  constexpr double kPatience = 20;
  if (waited_s <= timeout_s_) return;
  if (!item.is_too_far_ahead) throw_busy(item.actor->part(), item.chunk, timeout_s_);
  if (waited_s > kPatience * timeout_s_)
    throw Error(ErrorKind::stalled, "there is no room for more of key \"" + *item.key + "\" in rounds that are open: " +
                                        item.actor->missing(item.chunk, item.pushes()));
}

// Of those that others use it leaves the numbers.
void DirectPath::begin_all(std::vector<DirectItem>& items, std::vector<size_t>& chosen,
                           std::vector<DirectItem>& left_behind) {
  const Lock lock(mutex_);
  size_t left = 0;
  for (const size_t i : chosen) {
    DirectItem& item = items[i];
    if (ended_) throw Error(*ended_);
    if (rounds_error_ && is_synchronous(item)) throw Error(*rounds_error_);
    const Reach reached = reach(item);
    item.waits_for_server = reached == Reach::away;
    if (reached == Reach::left) left_behind.push_back(std::move(item));
    if (reached == Reach::away) chosen[left++] = i;
    if (reached != Reach::present) continue;
    const Step step = item.source.values ? begin(item) : look(item);
    if (step == Step::busy)
      chosen[left++] = i;
    else if (step == Step::open)
      open_.push_back(std::move(item));
    else
      item.handle->end_one(std::nullopt);
  }
  chosen.resize(left);
  collect(kAhead);
}

DirectPath::Step DirectPath::begin(DirectItem& item) {
  Answer* const answer = item.answer.place ? &item.answer : nullptr;
  const Outcome outcome =
      item.actor->push(item.chunk, item.pushes(), item.source, {item.operation->lr, item.operation->wd}, answer);
  item.is_too_far_ahead = outcome == Outcome::full;
  switch (outcome) {
    case Outcome::busy:
    case Outcome::full:
    case Outcome::early:  // another thread is about to push what comes before it
      return Step::busy;
    case Outcome::applied:
    case Outcome::held:
    case Outcome::left:
    case Outcome::duplicate:
      break;
  }
  item.source.values = nullptr;
  if (outcome == Outcome::left || (outcome == Outcome::applied && item.actor->part().has_parked())) tell_server_(item);
  return !answer || answer->is_there ? Step::over : Step::open;
}

DirectPath::Step DirectPath::look(DirectItem& item) {
  if (!item.actor->may_be_ready(item.chunk, item.pushes())) return Step::open;
  switch (item.actor->read(item.chunk, item.pushes(), item.answer)) {
    case Reading::done:
      return Step::over;
    case Reading::not_yet:
      return Step::open;
    case Reading::busy:
      break;
  }
  return Step::busy;
}

// Of those that are open it looks at the first ones.
bool DirectPath::collect(size_t most) {
  if (!absent_.empty()) fail_what_is_lost();
  bool has_some = false;
  size_t left = 0;
  const size_t end = std::min(most, open_.size());
  for (size_t i = 0; i < end; ++i) {
    if (!is_away(open_[i].operation->server) && look(open_[i]) == Step::over) {
      open_[i].handle->end_one(std::nullopt);
      has_some = true;
    } else {
      if (left != i) open_[left] = std::move(open_[i]);
      ++left;
    }
  }
  open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(left), open_.begin() + static_cast<std::ptrdiff_t>(end));
  return has_some;
}

// The worker that closes a round reads all pushes, best while they are cached: so workers stay near each other.
void DirectPath::let_others_come(const std::vector<Actor*>& actors) {
  constexpr size_t kMostHeld = 32;
  constexpr double kPatience_s = 5e-3;
  const double begin = now_s();
  for (int times = 0;; ++times) {
    {
      const Lock lock(mutex_);
      size_t held = 0;
      for (Actor* const actor : actors) held += actor->held();
      if (held <= kMostHeld) is_ahead_ = false;
      if (is_ahead_ || held <= kMostHeld) return;
      collect(kAhead);
      is_ahead_ = now_s() - begin > kPatience_s;
    }
    pause(times);
  }
}

bool DirectPath::advance() {
  const KeptDenormals kept;
  const Lock lock(mutex_);
  return collect(kAll);
}

bool DirectPath::wait(StoreHandle& handle, double longest_s) {
  const KeptDenormals kept;
  thread_local Waiter waiter;
  const double end = now_s() + longest_s;
  while (!handle.is_done()) {
    const auto has_moved = [&] {
      const Lock lock(mutex_);
      return collect(kAhead) || handle.is_done();
    };
    if (waiter.is_quick(has_moved)) continue;
    std::shared_ptr<Part> awaited;
    uint32_t seen = 0;
    {
      const Lock lock(mutex_);
      for (const DirectItem& item : open_)
        if (item.handle.get() == &handle) {
          awaited = item.actor->shared_part();
          seen = awaited->header().doorbell.value.load(std::memory_order_acquire);
          break;
        }
      if (collect(kAll)) continue;
    }
    const double left_s = end - now_s();
    if (left_s <= 0) break;
    if (awaited)
      awaited->header().doorbell.sleep(seen, left_s);
    else
      handle.sleep(left_s);
  }
  return handle.is_done();
}

std::string DirectPath::missing(const StoreHandle& handle) {
  const Lock lock(mutex_);
  for (const DirectItem& item : open_)
    if (item.handle.get() == &handle)
      return "key \"" + *item.key + "\": " + item.actor->missing(item.chunk, item.pushes());
  return "";
}

std::vector<size_t> DirectPath::awaited(const StoreHandle& handle) {
  const Lock lock(mutex_);
  for (const DirectItem& item : open_)
    if (item.handle.get() == &handle) return item.actor->awaited(item.chunk, item.pushes());
  return {};
}

void DirectPath::fail_rounds(const Error& error) {
  const Lock lock(mutex_);
  rounds_error_ = error;
  fail_open(error, &is_synchronous);
}

void DirectPath::resume_rounds() {
  const Lock lock(mutex_);
  rounds_error_.reset();
}

void DirectPath::end(const Error& error) {
  const Lock lock(mutex_);
  if (!ended_) ended_ = error;
  fail_open(error, [](const DirectItem&) { return true; });
}

// ------------------------------------------------------------------------------------------------------------- servers

DirectPath::Reach DirectPath::reach(const DirectItem& item) const {
  if (absent_.empty() && left_.empty()) return Reach::present;
  if (left_.count(item.actor)) return Reach::left;
  const auto absence = absent_.find(item.operation->server);
  if (absence == absent_.end()) return Reach::present;
  if (now_s() >= absence->second.until_s)
    throw Error(absence->second.error.kind(), absence->second.error.what() + (" (key \"" + *item.key + "\")"));
  return Reach::away;
}

bool DirectPath::is_away(int server) const { return !absent_.empty() && absent_.count(server) != 0; }

void DirectPath::fail_what_is_lost() {
  const double now = now_s();
  for (const auto& [server, absence] : absent_)
    if (now >= absence.until_s)
      fail_open(absence.error, [server = server](const DirectItem& item) { return item.operation->server == server; });
}

void DirectPath::lose_server(int server, const Error& error, double until_s) {
  const Lock lock(mutex_);
  const auto [absence, is_new] = absent_.try_emplace(server, Absence{error, until_s});
  if (!is_new && until_s < absence->second.until_s) absence->second = {error, until_s};
  fail_what_is_lost();
}

void DirectPath::resume_server(int server) {
  const Lock lock(mutex_);
  absent_.erase(server);
}

void DirectPath::leave(const Actor& actor, const Error& error) {
  const Lock lock(mutex_);
  left_.insert(&actor);
  fail_open(error, [&](const DirectItem& item) { return item.actor == &actor; });
}

void DirectPath::await_server(int server, Interrupt interrupt) {
  while (true) {
    {
      const Lock lock(mutex_);
      const auto absence = absent_.find(server);
      if (absence == absent_.end()) return;
      if (now_s() >= absence->second.until_s) throw Error(absence->second.error);
    }
    interrupt();
    Waiter::nap(kBetweenLooks_s);
  }
}

template <typename Fails>
void DirectPath::fail_open(const Error& error, Fails fails) {
  std::deque<DirectItem> kept;
  for (DirectItem& item : open_)
    if (fails(item))
      item.handle->end_one(Error(error.kind(), std::string(error.what()) + " (key \"" + *item.key + "\")"));
    else
      kept.push_back(std::move(item));
  open_.swap(kept);
}

}  // namespace ringtrain
