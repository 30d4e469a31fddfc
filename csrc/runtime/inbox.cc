#include "runtime/inbox.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace ringtrain {
namespace {

void add_to(Totals& totals, const Submission& submission) {
  const Progress& progress = submission.progress;
  ++totals.operations;
  if (progress.error != ErrorKind::none) ++totals.failed;
  if (progress.begun_s == 0) return;
  totals.bytes += submission.operation().bytes();
  totals.queued_s += progress.announced_s - progress.submitted_s;
  totals.waiting_s += progress.agreed_s - progress.announced_s;
  totals.ready_s += progress.begun_s - progress.agreed_s;
  totals.working_s += progress.ended_s - progress.begun_s;
}

// Has many divisors: a script that repeats 1 to 6, 8, 10 or 12 operations without a name in turn always submits the
// same one under a name, so these are found in the cache.
constexpr int64_t kUnnamedNames = 240;

// Messages between two ranks need no name but for announcements, in which those of all ranks meet.
std::string name_of_message(const Submission& message) {
  const std::vector<int64_t>& numbers = message.operation().numbers;
  return "<message " + std::to_string(message.number) + (message.outputs.size() > 0 ? " to " : " from ") +
         std::to_string(numbers[message.outputs.size() > 0 ? 1 : 0]) + ">";
}

// Returns the memory of a tensor so short that it may travel beside its bit, if it can be reduced as it is; else null.
const void* value_to_travel(const Submission& submission) {
  const Operation& one = submission.operation();
  const bool is_plain = one.kind == OpKind::allreduce && one.op != ReduceOp::adasum && !one.is_on_gpu &&
                        one.quantizer.kind == Quantizer::Kind::none && one.factors.prescale == 1.0 && !one.is_weighted;
  if (!is_plain || submission.inputs.size() != 1) return nullptr;
  const size_t bytes = one.bytes();
  return bytes > 0 && bytes <= Value::kMostBytes ? submission.inputs[0] : nullptr;
}

}  // namespace

SubmissionPtr History::add(SubmissionPtr submission) {
  const std::string_view kind = kind_of(*submission->request);
  auto it = totals_.find(kind);
  if (it == totals_.end()) it = totals_.emplace(kind, Totals()).first;
  add_to(it->second, *submission);
  if (ring_.size() < kCapacity) {
    ring_.push_back(std::move(submission));
    return nullptr;
  }
  std::swap(ring_[next_], submission);
  next_ = (next_ + 1) % kCapacity;
  return submission;
}

std::vector<SubmissionPtr> History::last(size_t most) const {
  most = std::min(most, ring_.size());
  std::vector<SubmissionPtr> submissions;
  submissions.reserve(most);
  for (size_t i = ring_.size() - most; i < ring_.size(); ++i) submissions.push_back(ring_[(next_ + i) % ring_.size()]);
  return submissions;
}

void Inbox::enter(Submission& submission) {
  if (closed_with_) throw Error(*closed_with_);
  submission.number = added_.fetch_add(1, std::memory_order_relaxed) + 1;
  submission.progress.submitted_s = now_s();
  const int process_set = submission.operation().process_set;
  if (const auto ended = ended_.find(process_set); ended != ended_.end()) throw Error(ended->second);
  if (!allowed_.count(process_set))
    throw invalid(title_of(*submission.request) + ": process set " + std::to_string(process_set) +
                  " is not registered, or this rank does not belong to it");
  if (submission.operation().kind == OpKind::transfer) submission.own_operation().name = name_of_message(submission);
}

void Inbox::add_begun(const SubmissionPtr& message) {
  const Lock lock(mutex_);
  enter(*message);
  message->progress.announced_s = message->progress.submitted_s;
  in_flight_.emplace(view_of(message->operation()), message);
}

std::shared_ptr<Handle> Inbox::add(SubmissionPtr submission) {
  const Lock lock(mutex_);
  enter(*submission);
  const int process_set = submission->operation().process_set;
  const bool is_join = submission->operation().kind == OpKind::join;
  const bool is_message = submission->operation().kind == OpKind::transfer;
  const bool is_unnamed = !is_join && !is_message && submission->operation().name.empty();
  if (is_join) submission->own_operation().name = kJoinName;
  if (is_unnamed) name_it(*submission);
  const Operation& operation = submission->operation();
  if (!in_flight_.emplace(view_of(operation), submission).second) {
    if (!is_unnamed && !submission->waits_for_name && has_twin(operation))
      throw invalid(title_of(*submission->request) +
                    ": an operation of this name is in flight; wait for it, or use another name");
    waiting_[key_of(operation)].push_back(submission);
    return submission->handle;
  }
  if (is_join) {
    submission->own_operation().numbers = {unnamed_[process_set].count};
    if (has_waiting(process_set)) return submission->handle;  // remove() announces it
  }
  announce(submission);
  return submission->handle;
}

bool Inbox::has_twin(const Operation& operation) const {
  const auto is_twin = [&](const SubmissionPtr& other) { return other->operation().kind == operation.kind; };
  if (is_twin(in_flight_.at(view_of(operation)))) return true;
  const auto behind = waiting_.find(key_of(operation));
  return behind != waiting_.end() && std::any_of(behind->second.begin(), behind->second.end(), is_twin);
}

void Inbox::announce(const SubmissionPtr& submission) {
  const auto allowed = allowed_.find(submission->operation().process_set);
  if (allowed == allowed_.end()) return;  // it fails, as all that is pending for it
  Arrivals& arrivals = submission->operation().kind == OpKind::transfer ? messages_ : *allowed->second;
  arrivals.new_.push_back(submission);
  arrivals.has_new_.store(true, std::memory_order_release);
}

bool Inbox::has_waiting(int process_set) const {
  const auto first = waiting_.lower_bound({process_set, ""});
  return first != waiting_.end() && first->first.first == process_set;
}

void Inbox::name_it(Submission& submission) {
  Unnamed& of_set = unnamed_[submission.operation().process_set];
  const int64_t place = of_set.count++ % kUnnamedNames;
  of_set.named.resize(kUnnamedNames);
  auto& [unnamed, named] = of_set.named[static_cast<size_t>(place)];
  if (unnamed != submission.request) {
    unnamed = submission.request;
    submission.own_operation().name = "<unnamed " + std::to_string(place) + ">";
    named = submission.request;
  }
  submission.request = named;
  if (has_peers_) note_unnamed(submission);
}

void Inbox::note_unnamed(Submission& submission) {
  submission.is_unnamed = true;
  submission.submitter = std::this_thread::get_id();
  std::vector<OfThread>& threads = unnamed_of_threads_[submission.operation().process_set];
  OfThread* own = nullptr;
  for (OfThread& one : threads) {
    if (one.thread == submission.submitter)
      own = &one;
    else if (one.awaited > 0)
      submission.own_request().is_unordered = true;
    else
      warn_of_order(submission, one);
  }
  if (!own) {
    own = &threads.emplace_back();
    own->thread = submission.submitter;
  }
  ++own->in_flight;
  own->awaited += submission.is_awaited;
  own->site = submission.request->site;
}

void Inbox::forget_unnamed(const Submission& submission) {
  std::vector<OfThread>& threads = unnamed_of_threads_[submission.operation().process_set];
  const auto own = std::find_if(threads.begin(), threads.end(),
                                [&](const OfThread& one) { return one.thread == submission.submitter; });
  own->awaited -= submission.is_awaited;
  if (--own->in_flight == 0) threads.erase(own);
}

void Inbox::warn_of_order(const Submission& submission, const OfThread& other) {
  if (std::exchange(has_warned_of_order_, true)) return;
  const auto at = [](const std::shared_ptr<const std::string>& site) {
    return site && !site->empty() ? " (at " + *site + ")" : "";
  };
  warn("two threads have submitted operations without a name that are under way at the same time: " +
       title_of(*submission.request) + at(submission.request->site) + " while another thread has one" + at(other.site) +
       ". Ranks match them by their order. Unless the threads keep that order on all ranks, values get mixed up: give "
       "each operation a name that is the same on all ranks. This is said once.");
}

template <typename Take>
void Inbox::take(Arrivals& arrivals, double now, Take take) {
  if (!arrivals.has_new()) return;
  const Lock lock(mutex_);
  arrivals.has_new_.store(false, std::memory_order_relaxed);
  for (SubmissionPtr& submission : arrivals.new_) {
    if (submission->progress.ended_s != 0) continue;  // it has failed before it was announced
    submission->progress.announced_s = std::max(now, submission->progress.submitted_s);
    take(submission);
  }
  arrivals.new_.clear();
}

void Inbox::take_new(Arrivals& arrivals, std::vector<Fresh>& fresh, double now) {
  fresh.clear();
  take(arrivals, now, [&](const SubmissionPtr& one) { fresh.push_back({one->request, value_to_travel(*one)}); });
}

void Inbox::take_new_messages(std::vector<SubmissionPtr>& fresh, double now) {
  fresh.clear();
  take(messages_, now, [&](SubmissionPtr& submission) { fresh.push_back(std::move(submission)); });
}

void Inbox::note_begun(Submission& message, double now) {
  const Lock lock(mutex_);
  message.progress.agreed_s = message.progress.begun_s = now;
}

std::vector<SubmissionPtr> Inbox::find(const Plan& plan, int rank, double agreed_s, double now, const char* group) {
  std::vector<SubmissionPtr> submissions;
  submissions.reserve(plan.parts.size());
  const Lock lock(mutex_);
  for (const AgreementPtr& part : plan.parts) {
    const auto it = part->has_joined(rank) ? in_flight_.end() : in_flight_.find(view_of(part->operation));
    submissions.push_back(it == in_flight_.end() ? nullptr : it->second);
    if (it == in_flight_.end()) continue;
    Progress& progress = it->second->progress;
    progress.agreed_s = agreed_s;
    progress.begun_s = now;
    progress.group = group;
    it->second->is_under_way = true;
  }
  return submissions;
}

void Inbox::give_up(const std::vector<SubmissionPtr>& submissions) {
  const Lock lock(mutex_);
  for (const SubmissionPtr& submission : submissions)
    if (submission) submission->is_under_way = false;
}

// Entries that leave the history are freed after the lock.
double Inbox::remove(const std::vector<SubmissionPtr>& submissions, ErrorKind error) {
  const double now = now_s();
  std::vector<SubmissionPtr> forgotten;
  forgotten.reserve(submissions.size());
  const Lock lock(mutex_);
  for (const SubmissionPtr& submission : submissions) {
    if (!submission) continue;
    remove(submission);
    forgotten.push_back(end(submission, error, now));
  }
  return now;
}

SubmissionPtr Inbox::end(const SubmissionPtr& submission, ErrorKind error, double now) {
  submission->progress.ended_s = now;
  submission->progress.error = error;
  if (submission->is_unnamed) forget_unnamed(*submission);
  if (timeline_) timeline_->note(submission);
  return history_.add(submission);
}

void Inbox::set_timeline(std::shared_ptr<Timeline> timeline) {
  const Lock lock(mutex_);
  timeline_.swap(timeline);  // the old one writes what it has left when the lock is free again
  has_timeline_ = timeline_ != nullptr;
  announce_timeline(timeline_);
}

std::shared_ptr<Timeline> Inbox::timeline() {
  const Lock lock(mutex_);
  return timeline_;
}

void Inbox::remove(const SubmissionPtr& submission) {
  in_flight_.erase(view_of(submission->operation()));
  if (!waiting_.empty()) let_in_who_waits(key_of(submission->operation()));
}

void Inbox::let_in_who_waits(const Key& key) {
  const auto it = waiting_.find(key);
  if (it == waiting_.end()) return;
  const SubmissionPtr next = it->second.front();
  in_flight_.emplace(view_of(next->operation()), next);
  announce(next);
  it->second.pop_front();
  if (!it->second.empty()) return;
  waiting_.erase(it);
  const auto join = in_flight_.find({key.first, kJoinName});
  if (join != in_flight_.end() && !has_waiting(key.first)) announce(join->second);
}

std::vector<std::pair<SubmissionPtr, Progress>> Inbox::last_operations(size_t most_ended) {
  const Lock lock(mutex_);
  std::vector<std::pair<SubmissionPtr, Progress>> operations;
  for (const SubmissionPtr& submission : history_.last(most_ended))
    operations.emplace_back(submission, submission->progress);
  const size_t ended = operations.size();
  for (const auto& [key, submission] : in_flight_) operations.emplace_back(submission, submission->progress);
  for (const auto& [key, submissions] : waiting_)
    for (const SubmissionPtr& submission : submissions) operations.emplace_back(submission, submission->progress);
  std::sort(operations.begin() + static_cast<std::ptrdiff_t>(ended), operations.end(),
            [](const auto& a, const auto& b) { return a.first->number < b.first->number; });
  return operations;
}

std::string Inbox::pending_text() {
  constexpr size_t kShown = 5;
  std::string text;
  const Lock lock(mutex_);
  if (in_flight_.empty()) return "nothing is pending here";
  size_t shown = 0;
  for (const auto& [key, submission] : in_flight_) {
    if (shown++ == kShown) break;
    const Request& request = *submission->request;
    text += (text.empty() ? "pending here: " : ", ") + title_of(request);
    if (request.site && !request.site->empty()) text += " (at " + *request.site + ")";
  }
  const size_t more = in_flight_.size() > kShown ? in_flight_.size() - kShown : 0;
  return more == 0 ? text : text + " and " + std::to_string(more) + " more";
}

TotalsOfKinds Inbox::totals() {
  const Lock lock(mutex_);
  TotalsOfKinds totals = history_.totals();
  if (const uint64_t messages = direct_messages_.load(std::memory_order_relaxed); messages > 0) {
    Totals& of_messages = totals[name_of(OpKind::transfer)];
    of_messages.operations += messages;
    of_messages.bytes += direct_bytes_.load(std::memory_order_relaxed);
  }
  return totals;
}

void Inbox::allow(int process_set, Arrivals& arrivals) {
  const Lock lock(mutex_);
  allowed_[process_set] = &arrivals;
}

// Handles are failed when the lock is free: a callback of theirs may submit.
void Inbox::forbid(int process_set, ErrorKind kind, const std::string& why) {
  std::vector<SubmissionPtr> failed;
  {
    const Lock lock(mutex_);
    allowed_.erase(process_set);
    unnamed_.erase(process_set);
    failed = take_pending(process_set, kind);
    unnamed_of_threads_.erase(process_set);
  }
  for (const SubmissionPtr& one : failed)
    one->handle->fail(kind, title_of(*one->request) + ": process set " + std::to_string(process_set) + " " + why);
}

// Of one process set or of all, but for what a thread carries out. Notes that it has ended.
std::vector<SubmissionPtr> Inbox::take_pending(std::optional<int> process_set, ErrorKind error) {
  const auto is_meant = [&](const SubmissionPtr& one) {
    return !one->is_under_way && (!process_set || one->operation().process_set == *process_set);
  };
  std::vector<SubmissionPtr> taken;
  for (auto it = in_flight_.begin(); it != in_flight_.end();) {
    if (is_meant(it->second)) taken.push_back(it->second);
    it = is_meant(it->second) ? in_flight_.erase(it) : std::next(it);
  }
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const bool are_meant = is_meant(it->second.front());
    if (are_meant) taken.insert(taken.end(), it->second.begin(), it->second.end());
    it = are_meant ? waiting_.erase(it) : std::next(it);
  }
  const double now = now_s();
  for (const SubmissionPtr& one : taken) end(one, error, now);
  return taken;
}

void Inbox::set_unnamed(int process_set, int64_t count) {
  const Lock lock(mutex_);
  unnamed_[process_set].count = count;
}

void Inbox::restart_unnamed() {
  const Lock lock(mutex_);
  unnamed_.clear();
}

void Inbox::end(int process_set, const Error& error) {
  std::vector<SubmissionPtr> failed;
  {
    const Lock lock(mutex_);
    allowed_.erase(process_set);
    ended_.emplace(process_set, error);
    failed = take_pending(process_set, error.kind());
  }
  for (const SubmissionPtr& one : failed) one->handle->fail(error.kind(), error.what());
}

void Inbox::close(const Error& error) {
  std::vector<SubmissionPtr> failed;
  Error reason = error;
  {
    const Lock lock(mutex_);
    if (!closed_with_) closed_with_ = error;
    reason = *closed_with_;
    failed = take_pending(std::nullopt, reason.kind());
  }
  for (const SubmissionPtr& one : failed) one->handle->fail(reason.kind(), reason.what());
}

}  // namespace ringtrain
