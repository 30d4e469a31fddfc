#include "xla/completer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/signals.h"
#include "base/wait.h"
#include "runtime/engine.h"
#include "xla/call.h"

namespace ringtrain::xla {
namespace {

constexpr int kThreads = 2;
// How long one of them is waited for: while others wait for a thread, and while none does.
constexpr double kMoment_s = 0.01, kLong_s = 0.2;
// For so long MPI may still work with the memory of operations that have failed.
constexpr double kUntilFree_s = 2.0;

bool is_never_interrupted() { return false; }

void set(const Api& api, Future* future, const std::optional<Error>& error) {
  if (error) {
    FutureSetError set = {sizeof(FutureSetError), nullptr, future, failure_of(api, *error)};
    api.set_error(&set);
  } else {
    FutureSetAvailable set = {sizeof(FutureSetAvailable), nullptr, future};
    api.set_available(&set);
  }
}

}  // namespace

// The engine of the Handle may have ended; then the Handle has, too.
bool wait_for(Handle& handle, double timeout_s) {
  if (handle.is_done()) return true;
  const std::shared_ptr<Engine> engine = current_engine();
  return engine ? engine->wait(handle, timeout_s, &is_never_interrupted) : handle.wait(timeout_s);
}

bool Started::wait(double timeout_s) const {
  if (exchange) return exchange->wait(timeout_s);
  return !handle || wait_for(*handle, timeout_s);
}

void Started::require() const {
  if (error) throw Error(*error);
  if (exchange)
    exchange->require();
  else
    handle->result();
}

void wait_until_memory_is_free() {
  tickets().await_all();
  while (!Waiter::comes_true([] { return tickets().are_done(); }, kLong_s)) continue;
  Waiter::comes_true([] { return tickets().are_free(); }, kUntilFree_s);
}

const OwnedTensor& result_of(const Started& started, size_t bytes) {
  const OwnedTensor& tensor = started.handle->result().tensors.front();
  if (tensor.spec.bytes() != bytes)
    throw Error(ErrorKind::mismatch,
                "the result is " + to_string(tensor.spec) +
                    ", which is not what was expected when the program was compiled: inside jit all ranks must send as "
                    "many rows, and the job must have as many ranks as then");
  return tensor;
}

Completion::Completion(const Api& api, const std::vector<uint32_t>& numbers, std::vector<Copy> copies)
    : api_(&api), copies_(std::move(copies)) {
  for (const uint32_t ticket : numbers) entries_.push_back({ticket, tickets().await(ticket)});
}

bool Completion::is_done() const {
  return std::all_of(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.started.is_done(); });
}

bool Completion::wait(double timeout_s) {
  const double deadline = now_s() + timeout_s;
  for (; done_ < entries_.size(); ++done_)
    if (!entries_[done_].started.wait(std::max(deadline - now_s(), 0.0))) return false;
  return true;
}

bool Completion::has_failed_early() const {
  const auto has_failed = [](const Entry& entry) { return error_of([&] { entry.started.require(); }).has_value(); };
  return std::any_of(entries_.begin(), entries_.end(), has_failed) && !tickets().are_free();
}

std::optional<Error> Completion::take_results() {
  const std::optional<Error> error = error_of([&] {
    for (const Entry& entry : entries_) entry.started.require();
    copy_results();
  });
  if (error) wait_until_memory_is_free();
  for (const Entry& entry : entries_) tickets().forget(entry.ticket);
  return error;
}

void Completion::copy_results() {
  for (const Copy& copy : copies_) {
    const Started started = tickets().at(copy.ticket);
    const OwnedTensor& tensor = result_of(started, copy.bytes);
    if (copy.bytes > 0) std::memcpy(copy.to, tensor.memory.get(), copy.bytes);
  }
}

uint32_t Tickets::add(Started started) {
  const Lock lock(mutex_);
  started_.emplace(++last_, std::move(started));
  return last_;
}

Started Tickets::at(uint32_t ticket) const {
  const Lock lock(mutex_);
  const auto found = started_.find(ticket);
  if (found == started_.end()) throw failure("XLA has finished an operation twice, or one that was never started");
  return found->second;
}

Started Tickets::await(uint32_t ticket) {
  const Lock lock(mutex_);
  const auto found = started_.find(ticket);
  if (found == started_.end()) throw failure("XLA waits for an operation that was never started");
  found->second.is_awaited = true;
  return found->second;
}

void Tickets::await_all() {
  std::vector<std::shared_ptr<Exchange>> exchanges;
  {
    const Lock lock(mutex_);
    for (auto& [ticket, started] : started_) {
      started.is_awaited = true;
      if (started.exchange) exchanges.push_back(started.exchange);
    }
  }
  for (const std::shared_ptr<Exchange>& exchange : exchanges) exchange->leave_to_engine();
}

std::vector<std::shared_ptr<Handle>> Tickets::awaited() const {
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<Handle>> handles;
  for (const auto& [ticket, started] : started_) {
    if (!started.is_awaited) continue;
    const std::vector<std::shared_ptr<Handle>> own =
        started.exchange ? started.exchange->handles() : std::vector<std::shared_ptr<Handle>>{started.handle};
    for (const std::shared_ptr<Handle>& handle : own)
      if (handle && !handle->is_done()) handles.push_back(handle);
  }
  return handles;
}

void Tickets::forget(uint32_t ticket) {
  const Lock lock(mutex_);
  started_.erase(ticket);
}

bool Tickets::are_done() const {
  const Lock lock(mutex_);
  return std::all_of(started_.begin(), started_.end(), [](const auto& entry) { return entry.second.is_done(); });
}

bool Tickets::are_free() const {
  const Lock lock(mutex_);
  return std::all_of(started_.begin(), started_.end(), [](const auto& entry) { return entry.second.is_memory_free(); });
}

// Never destroyed: threads of XLA may be at work when the process ends.
Tickets& tickets() {
  static Tickets& all = *new Tickets;
  return all;
}

void Completer::post(Completion completion) {
  const Lock lock(mutex_);
  waiting_.push_back(std::move(completion));
  if (threads_ < kThreads) {
    ++threads_;
    start_thread(&Completer::work, this).detach();
  }
  has_come_.notify_one();
}

void Completer::work() {
  while (true) {
    Completion completion = next();
    if (completion.wait(is_anybody_waiting() ? kMoment_s : kLong_s))
      set(completion.api(), completion.future, completion.take_results());
    else
      post(std::move(completion));
  }
}

Completion Completer::next() {
  const Lock lock(mutex_);
  while (waiting_.empty()) has_come_.wait(mutex_);
  Completion first = std::move(waiting_.front());
  waiting_.pop_front();
  return first;
}

bool Completer::is_anybody_waiting() {
  const Lock lock(mutex_);
  return !waiting_.empty();
}

// Never destroyed, and its threads never end: the process may end while they wait.
Completer& completer() {
  static Completer& only = *new Completer;
  return only;
}

}  // namespace ringtrain::xla
